"""The server, over real connections: what clients get, and what they cannot do to each other."""

import asyncio
import json
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from urllib.error import HTTPError

import pytest
import torch
import uvicorn

from moe.commands import serve
from moe.errors import ConfigError
from moe.serving.batch_generator import BatchGenerator, encode_items
from moe.serving.engine import Engine
from moe.serving.server import CompletionServer
from tests.models.tiny import tiny_model
from tests.processes import TIMEOUT, Command
from tests.serving.tiny_words import ours, texts, word_tokenizer

LONGEST = 12


@contextmanager
def serving(model=None, tokenizer=None, hosts=("*",), languages=None, **limits):
    """Yields the address of a server in another thread."""
    generator = BatchGenerator(
        model or ours(),
        tokenizer or word_tokenizer(),
        max_batch=5,
        languages=languages,
        max_new_tokens=LONGEST,
    )
    server = CompletionServer(generator, "tiny", hosts=hosts, **{"timeout": 20.0, **limits})
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    runner = uvicorn.Server(server.uvicorn_config())
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        runner.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address():
    with serving() as found:
        yield found


def post(address, body, path="/v1/completions", **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(address + path, data, headers)
    with urllib.request.urlopen(request) as response:
        return response.read().decode()


def get(address, path):
    with urllib.request.urlopen(address + path, timeout=TIMEOUT) as response:
        return response.read().decode()


def complete(address, **body):
    return json.loads(post(address, body))


def read_events(text):
    *events, last = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def expected(inputs, **options):
    generator = BatchGenerator(ours(), word_tokenizer(), **{"max_new_tokens": LONGEST, **options})
    return list(generator.map(inputs))


def refusal(address, body, path="/v1/completions", **headers):
    with pytest.raises(HTTPError) as caught:
        if body is None:
            get(address, path)
        else:
            post(address, body, path, **headers)
    with caught.value as response:
        return response.code, json.loads(response.read())["error"]["message"]


def test_an_answer_is_that_of_the_model_with_its_numbers_of_tokens(address):
    (text,) = texts(1)
    (answer,) = expected([text], scores=True)
    whole = complete(address, prompt=text, model="tiny", logprobs=0)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (answer.text, "length")
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(answer.log_probs, abs=1e-5)
    num_inputs = len(text.split()) + 1
    assert whole["usage"] == {
        "prompt_tokens": num_inputs,
        "completion_tokens": len(answer.tokens),
        "total_tokens": num_inputs + len(answer.tokens),
    }


def test_a_stream_has_the_same_text_and_tokens(address):
    (text,) = texts(1)
    (answer,) = expected([text])
    body = {"prompt": text, "stream": True, "return_token_ids": True}
    *events, usage = read_events(post(address, {**body, "stream_options": {"include_usage": True}}))
    assert len(events) > 3
    assert "".join(event["choices"][0]["text"] for event in events) == answer.text
    tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert tokens == answer.tokens
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(tokens)


def test_log_probabilities_are_those_of_a_whole_pass_and_in_every_event(address):
    (text,) = texts(1)
    (answer,) = expected([text])
    tokenizer = word_tokenizer()
    log_probs = complete(address, prompt=text, logprobs=3)["choices"][0]["logprobs"]
    inputs = torch.tensor([tokenizer(text)["input_ids"]])
    logits = ours()(input_ids=inputs, labels=torch.tensor([answer.tokens])).logits[0]
    values, tokens = logits.log_softmax(-1).topk(3)
    assert len(log_probs["top_logprobs"]) == len(answer.tokens)
    for index, likeliest in enumerate(log_probs["top_logprobs"]):
        assert list(likeliest) == tokenizer.convert_ids_to_tokens(tokens[index].tolist())
        assert list(likeliest.values()) == pytest.approx(values[index].tolist(), abs=1e-5)
        assert log_probs["token_logprobs"][index] == max(likeliest.values())

    events = read_events(post(address, {"prompt": text, "logprobs": 3, "stream": True}))
    parts = [event["choices"][0]["logprobs"] for event in events]
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert [value for part in parts for value in part[key]] == log_probs[key]

    # A token that was drawn is there beside the likeliest.
    drawn = complete(address, prompt=text, logprobs=1, temperature=9, seed=7, top_k=-1)
    log_probs = drawn["choices"][0]["logprobs"]
    assert max(map(len, log_probs["top_logprobs"])) == 2
    for token, likeliest in zip(log_probs["tokens"], log_probs["top_logprobs"], strict=True):
        assert token in likeliest
    plain = complete(address, prompt=text, logprobs=False, temperature=9, seed=7)["choices"][0]
    assert (plain["logprobs"], plain["text"]) == (None, drawn["choices"][0]["text"])


def test_prompts_are_texts_or_tokens_and_have_n_answers_of_their_own_seeds(address):
    inputs = texts(2)
    tokens = word_tokenizer()(inputs)["input_ids"]
    body = {"n": 3, "temperature": 1.5, "seed": 7}
    choices = complete(address, prompt=inputs, **body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert len({choice["text"] for choice in choices}) == 6
    assert complete(address, prompt=tokens, **body)["choices"] == choices
    drawn = expected([text for text in inputs for _ in range(3)], temperature=1.5, seed=7)
    assert [choice["text"] for choice in choices] == [answer.text for answer in drawn]
    assert len(complete(address, prompt=tokens[0])["choices"]) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "The body"),
        (b"\xff", "UTF-8"),
        ([], "The body is []"),
        ({}, "prompt is None"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": " "}, "not empty"),
        ({"prompt": [[1], "w3"], "n": 2, "temprature": 1}, "temperature"),
        ({"prompt": [131]}, "between 0 and 130"),
        ({"prompt": "w2", "max_tokens": 13}, "from 1 to 12"),
        ({"prompt": "w2", "top_p": 0}, "top_p is 0"),
        ({"prompt": "w2", "echo": True, "logprobs": 1, "max_tokens": 1}, "backend=seq2seq"),
        ({"prompt": "w2", "suffix": "w3"}, "suffix is not supported"),
        ({"prompt": "w2", "logprobs": True}, "logprobs is True"),
        ({"prompt": "w2", "stop": ["a"] * 5}, "up to 4"),
        ({"prompt": "w2", "stream": "no"}, "stream"),
        ({"prompt": "w2", "n": 129}, "n is 129"),
        ({"prompt": ["w2"] * 100, "n": 11}, "1100 answers; expected at most 1024"),
    ],
)
def test_a_request_that_is_wrong_is_refused_with_the_field_and_its_value(address, body, words):
    status, message = refusal(address, body)
    assert status == 400
    assert words in message


def test_other_models_paths_methods_types_and_long_bodies_have_their_own_status(address):
    status, message = refusal(address, {"prompt": "w2", "model": "gpt"})
    assert status == 404 and "model is 'gpt'; expected 'tiny'." in message
    # No byte more, so that the server reads all of it.
    assert refusal(address, b" " * ((4 << 20) + 1))[0] == 413
    assert json.loads(get(address, "/v1/models"))["data"][0]["id"] == "tiny"
    status, message = refusal(address, {}, "/v1/chat/completions")
    assert status == 404 and "POST /v1/chat/completions" in message
    assert refusal(address, None, "/v1/completions")[0] == 405
    # A page of another site may post these types without asking first.
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, message = refusal(address, {"prompt": "w2"}, **{"content-type": kind})
        assert status == 415 and f"'{kind}'" in message
    assert post(address, {"prompt": "w2"}, **{"content-type": "Application/JSON; charset=utf-8"})


def test_hosts_that_are_not_the_server_are_refused():
    with serving(hosts=["127.0.0.1", "[::1]"]) as address:
        assert post(address, {"prompt": "w2"})
        assert post(address, {"prompt": "w2"}, host="[::1]:8000")
        with pytest.raises(HTTPError, match="400"):
            post(address, {"prompt": "w2"}, host="evil.example")


def test_more_requests_than_the_queue_holds_are_sent_away_at_once(monkeypatch):
    step = Engine.step
    may_continue = threading.Event()

    def waiting_step(engine):
        may_continue.wait()
        return step(engine)

    with serving(max_open=3) as address:
        monkeypatch.setattr(Engine, "step", waiting_step)
        answers = []
        client = threading.Thread(
            target=lambda: answers.append(complete(address, prompt=["w2"] * 3))
        )
        client.start()
        while json.loads(get(address, "/health"))["open"] < 3:
            time.sleep(0.01)
        with pytest.raises(HTTPError) as caught:
            complete(address, prompt="w2")
        with caught.value as response:
            assert (response.code, response.headers["retry-after"]) == (503, "1")
        may_continue.set()
        client.join()
        assert len(answers[0]["choices"]) == 3
        assert complete(address, prompt="w2")["choices"]


def test_the_server_answers_while_it_tokenizes(monkeypatch):
    may_continue = threading.Event()

    def wait_and_encode(*arguments):
        may_continue.wait(timeout=10)
        return encode_items(*arguments)

    with serving(timeout=0.5) as address:
        # Sizes are checked before: a megabyte takes seconds.
        for prompt, size in (("w2" * (32 * 512) + " ", "32769"), ([2] * 513, "513")):
            status, message = refusal(address, {"prompt": prompt})
            assert status == 400 and size in message

        # A request that waits for the tokenizer is ended, and others are served.
        monkeypatch.setattr("moe.serving.server.encode_items", wait_and_encode)
        assert refusal(address, {"prompt": "w2"})[0] == 504
        assert json.loads(get(address, "/health"))["open"] == 0
        may_continue.set()


async def talk(address, body, *, pause=0.0, sent=1.0):
    """Returns the bytes of a response to a client that sends and reads as slowly as it likes."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    message = head.encode() + data
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    try:
        writer.write(message[: int(sent * len(message))])
        parts = []
        while part := await reader.read(64 if pause else 1 << 16):
            parts.append(part)
            await asyncio.sleep(pause)
        return b"".join(parts)
    finally:
        writer.close()
        await writer.wait_closed()


def body_of(response):
    head, _, body = response.partition(b"\r\n\r\n")
    assert b" 200 " in head, response
    if b"chunked" in head:
        chunks = body.split(b"\r\n")
        body = b"".join(chunks[1::2])
    return body.decode()


def test_a_body_that_was_refused_is_not_read_forever():
    async def drip(address, path):
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(f"{head}content-length: 1000\r\n\r\n".encode())
        response = asyncio.create_task(reader.read())
        while not response.done():
            writer.write(b" ")
            await asyncio.wait([response], timeout=0.1)
        writer.close()
        return (await response)[9:12]

    async def clients(address):
        paths = ["/nothing", "/v1/completions"]
        async with asyncio.timeout(10):
            return await asyncio.gather(*(drip(address, path) for path in paths))

    with serving(timeout=0.5) as address:
        assert asyncio.run(clients(address)) == [b"404", b"408"]


@pytest.mark.slow
def test_60_clients_get_their_answers_beside_those_that_leave():
    inputs = texts(60, longest=30)
    answers = expected(inputs)

    async def clients(address):
        whole = [talk(address, {"prompt": text}) for text in inputs[:30]]
        streams = [
            talk(address, {"prompt": text, "stream": True}, pause=0.001 * (index % 3))
            for index, text in enumerate(inputs[30:])
        ]
        leaving = [asyncio.create_task(talk(address, {"prompt": text})) for text in inputs[:20]]
        await asyncio.sleep(0.05)
        for task in leaving:
            task.cancel()
        return await asyncio.gather(*whole, *streams)

    with serving(timeout=600.0) as address:
        bodies = [body_of(response) for response in asyncio.run(clients(address))]
        for body, answer in zip(bodies[:30], answers[:30], strict=True):
            assert json.loads(body)["choices"][0]["text"] == answer.text
        for body, answer in zip(bodies[30:], answers[30:], strict=True):
            events = read_events(body)
            assert "".join(event["choices"][0]["text"] for event in events) == answer.text
        while json.loads(get(address, "/health"))["open"]:
            time.sleep(0.01)


def test_clients_that_send_half_a_request_or_read_nothing_are_cut_off():
    async def clients(address):
        broken = [talk(address, {"prompt": "w2"}, sent=sent) for sent in (0.0, 0.3, 0.98)]
        return await asyncio.gather(*broken)

    with serving(timeout=0.5) as address:
        silent, half_head, half_body = asyncio.run(clients(address))
        assert silent == half_head == b""
        assert b" 408 " in half_body


def test_a_request_on_which_the_model_fails_gets_500_and_a_stream_an_event(monkeypatch):
    prefill = Engine._prefill

    def prefill_or_fail(engine, inputs, lengths):
        if [13, 1] in inputs:
            raise RuntimeError("no memory")
        return prefill(engine, inputs, lengths)

    with serving() as address:
        monkeypatch.setattr(Engine, "_prefill", prefill_or_fail)
        status, message = refusal(address, {"prompt": "w13"})
        assert status == 500 and "no memory" not in message
        assert '"code": 500' in post(address, {"prompt": "w13", "stream": True})
        (answer,) = expected(["w2"])
        assert complete(address, prompt="w2")["choices"][0]["text"] == answer.text


def test_an_engine_that_ends_is_seen_at_once_by_open_and_new_requests(monkeypatch):
    is_in_step = threading.Event()
    may_fail = threading.Event()

    def failing_step(engine):
        is_in_step.set()
        may_fail.wait()
        raise SystemExit

    with serving(timeout=60.0) as address, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(Engine, "step", failing_step)
        whole = pool.submit(refusal, address, {"prompt": "w2"})
        assert is_in_step.wait(60)
        stream = pool.submit(post, address, {"prompt": "w2", "stream": True})
        while json.loads(get(address, "/health"))["open"] < 2:
            time.sleep(0.01)
        may_fail.set()
        assert whole.result()[0] == 500
        assert '"code": 500' in stream.result()
        with pytest.raises(HTTPError, match="503"):
            get(address, "/health")
        status, message = refusal(address, {"prompt": "w2"})
        assert status == 503 and "SystemExit" in message


def test_an_answer_that_takes_too_long_is_ended_and_does_not_keep_the_server_from_ending(
    monkeypatch,
):
    step = Engine.step
    may_continue = threading.Event()

    def hanging_step(engine):
        may_continue.wait()
        return step(engine)

    with serving(timeout=0.5) as address:
        monkeypatch.setattr(Engine, "step", hanging_step)
        assert refusal(address, {"prompt": "w2"})[0] == 504
        assert '"code": 504' in post(address, {"prompt": "w2", "stream": True})
        assert json.loads(get(address, "/health"))["open"] == 0
    may_continue.set()


def test_an_empty_host_is_refused_since_it_would_be_every_address(tmp_path):
    with pytest.raises(ConfigError, match="--host is ''"):
        serve.main(["--model", str(tmp_path), "--host", ""])


@pytest.mark.slow
def test_a_server_that_is_told_to_end_answers_first(tmp_path):
    tiny_model(num_experts=6).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["serve", "--model", tmp_path / "model", "--port", port]
        ended = Command("stmoe", options).finish()
        assert ended.returncode == 2
        assert "Address already in use" in ended.stderr

    for number in (signal.SIGTERM, signal.SIGINT):
        command = Command("stmoe", options)
        address = f"http://127.0.0.1:{port}"

        def answers(address=address):
            with suppress(OSError):
                return get(address, "/health")

        command.wait_for(answers)
        body = {"prompt": "w2", "max_tokens": 200, "temperature": 3, "stream": True}
        request = urllib.request.Request(
            address + "/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as stream:
            assert stream.readline().startswith(b"data:")
            command.send_signal(number)
            assert stream.read().endswith(b"[DONE]\n\n")
        ended = command.finish()
        assert ended.returncode == 0
        assert "Traceback" not in ended.stderr
