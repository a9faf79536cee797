"""A soak of `stmoe serve`: thousands of requests of mixed lengths, of which some are wrong, some are
left by their clients, and half meet a server that was ended by SIGTERM and started again.

Every other answer must have the tokens of its request alone, which are computed without the server.
"""

import dataclasses
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.machine import describe_machine, print_report, save_report
from benchmarks.models.model import ModelCase, build_models
from moe.errors import DataError
from moe.hosts.all_hosts import load_model
from moe.serving.batch_generator import BatchGenerator, Request
from moe.serving.sampling import Sampling, sampling_of

SOAKED_CASE = ModelCase(
    vocab_size=131, d_model=32, d_ff=48, num_heads=2, num_layers=2, sparse_layers=1
)
WRONG_BODIES = (
    b'{"prompt": "w2", "temperature": 1, "top_k": ' + b"9" * 309 + b"}",
    b'{"prompt": "w2", "temperature": NaN}',
    b'{"prompt": [131]}',
    b'{"prompt": "w2", "n": 129}',
    b'{"prompt": "w2", "stop": [""]}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "w2"',
)
_TRY_SECONDS = 120  # how long a client tries to reach a server that starts again

Outcome = Literal["equal", "unequal", "refused", "left", "failed"]


@dataclass(frozen=True)
class SoakBenchmark:
    """What to send; the fields are the command's options.

    Attributes:
        json: File to save to; None for none.
        requests: How many.
        seed: Seed of the requests and their order.
        clients: How many are open at a time.
        num_prompts: Different prompts.
        longest: Most words of a prompt.
        share: Share of requests that are wrong, and of those that their clients leave.
        case: Sizes of the model.
    """

    json: Path | None
    requests: int = 20_000
    seed: int = 0
    clients: int = 24
    num_prompts: int = 60
    longest: int = 200
    share: float = 0.01
    case: ModelCase = SOAKED_CASE


class Known(NamedTuple):
    """A request with the tokens of its answer alone."""

    body: dict[str, Any]
    tokens: list[int]


def run_soak(benchmark: SoakBenchmark) -> None:
    """Sends all requests, prints the outcomes and saves them.

    Raises:
        DataError: When an answer differs, is missing, or a wrong request is not refused.
    """
    with tempfile.TemporaryDirectory() as temporary:
        save_model(benchmark.case, Path(temporary))
        known = answer_alone(benchmark, Path(temporary))
        report = describe_machine(torch.device("cpu"))
        report |= {"case": dataclasses.asdict(benchmark.case), "different_requests": len(known)}
        report |= send_all(benchmark, known, Path(temporary))
    save_report(report, benchmark.json)
    print_report(json.dumps(report, indent=1), benchmark.json)
    wrong = report["unequal"] + report["failed"]
    if wrong or report["left_open"]:
        raise DataError(
            f"{wrong} answers are wrong or missing, and {report['left_open']} requests were left open; expected none."
        )


def save_model(case: ModelCase, folder: Path) -> None:
    """Saves a model with random weights, and a tokenizer of numbered words."""
    torch.manual_seed(0)
    model = build_models(case, 4)["ours"]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)  # so that greedy answers do not repeat one token
    model.save_pretrained(folder)
    words = {"<pad>": 0, "</s>": 1, **{f"w{index}": index for index in range(2, case.vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def answer_alone(benchmark: SoakBenchmark, folder: Path) -> list[Known]:
    """Returns different requests, greedy and sampled, whole and streamed, and their tokens."""
    draw = random.Random(benchmark.seed)
    bodies: list[dict[str, Any]] = []
    for index in range(benchmark.num_prompts):
        length = round(benchmark.longest ** draw.random())
        words = [f"w{draw.randrange(2, benchmark.case.vocab_size)}" for _ in range(length)]
        settings = {"prompt": " ".join(words), "max_tokens": draw.randint(1, 12), "seed": index}
        bodies += [settings, {**settings, "temperature": 1.5, "top_k": 50}]

    generator = BatchGenerator(
        load_model(folder, dropless=True).eval(),
        PreTrainedTokenizerFast.from_pretrained(folder),
        max_batch=1,
    )
    requests = []
    for body in bodies:
        sampling = Sampling(
            body["max_tokens"],
            body.get("temperature", 0.0),
            body.get("top_k", 0),
            seed=body["seed"],
        )
        requests.append(Request(body["prompt"], sampling_of(sampling, 0)))
    return [
        Known({**body, "return_token_ids": True, "stream": number % 4 < 2}, answer.tokens)
        for number, (body, answer) in enumerate(zip(bodies, generator.map(requests), strict=True))
    ]


class Server:
    """`stmoe serve` in a process that can be ended and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._command = [sys.executable, "-m", "stmoe", "serve", "--model", str(folder)]
        self._command += ["--port", str(self.port)]
        self.start()

    def start(self) -> None:
        """Starts the process, and waits until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        self.send("GET", "/health")

    def end(self) -> int:
        """Sends SIGTERM, and returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_TRY_SECONDS)

    def resident_mb(self) -> int:
        """Returns the resident memory of the process."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * 4096 // 10**6

    def send(self, method: str, path: str, body: bytes = b"", *, leaves: bool = False) -> Any:
        """Returns the status and body of a response; a client that leaves does not wait for it."""
        give_up = time.monotonic() + _TRY_SECONDS
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TRY_SECONDS)
            try:
                connection.request(method, path, body, {"content-type": "application/json"})
                if leaves:
                    return None
                response = connection.getresponse()
                return response.status, response.read()
            except ConnectionError:  # ended, or not started yet; nothing was answered
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)
            finally:
                connection.close()


def ask(server: Server, known: list[Known], share: float, seed: int) -> Outcome:
    """Sends the request of a number, and returns how it ended."""
    draw = random.Random(seed)
    kind = draw.random()
    send = partial(server.send, "POST", "/v1/completions")
    if kind < share:
        status, _ = send(draw.choice(WRONG_BODIES))
        return "refused" if status == 400 else "failed"
    body, tokens = draw.choice(known)
    data = json.dumps(body).encode()
    if kind < 2 * share:
        send(data, leaves=True)
        return "left"
    try:
        status, text = send(data)
    except (OSError, http.client.HTTPException):
        return "failed"
    if status != 200:
        return "failed"
    events = text.decode().removesuffix("data: [DONE]\n\n").strip().split("\n\n")
    received: list[int] = []
    for event in events:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        received += choice["token_ids"]
    return "equal" if received == tokens else "unequal"


def send_all(benchmark: SoakBenchmark, known: list[Known], folder: Path) -> dict[str, Any]:
    """Returns the number of each outcome, and the server's memory after every twentieth."""
    outcomes: dict[str, int] = dict.fromkeys(get_args(Outcome), 0)
    memory: list[list[int]] = [[]]
    exit_codes: list[int] = []
    left_open = 0
    begin = time.monotonic()
    server = Server(folder)
    seeds = range(benchmark.seed << 32, (benchmark.seed << 32) + benchmark.requests)
    half = benchmark.requests // 2
    try:
        with ThreadPoolExecutor(benchmark.clients) as pool:
            answers = pool.map(partial(ask, server, known, benchmark.share), seeds)
            progress = tqdm(answers, total=benchmark.requests, desc="soak", mininterval=1.0)
            for number, outcome in enumerate(progress, start=1):
                outcomes[outcome] += 1
                if number % max(1, benchmark.requests // 20) == 0:
                    memory[-1].append(server.resident_mb())
                if number == half:  # clients try again until it answers
                    exit_codes.append(server.end())
                    server.start()
                    memory.append([])
        for _ in range(100):  # what clients have left ends soon
            left_open = json.loads(server.send("GET", "/health")[1])["open"]
            if not left_open:
                break
            time.sleep(0.1)
    finally:
        exit_codes.append(server.end())
    return {
        "requests": benchmark.requests,
        **outcomes,
        "left_open": left_open,
        "exit_codes": exit_codes,
        "seconds": round(time.monotonic() - begin),
        "memory_mb": memory,
    }
