"""A soak of `stmoe serve`: thousands of requests of mixed lengths, of which some are wrong and some
are left by their clients, while the server is ended by SIGTERM and started again.

Every other answer must have the tokens of its request alone, which are computed without the server.
"""

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.machine import describe_machine, print_report, save_report
from benchmarks.models.model import ModelCase, build_models
from moe.errors import DataError
from moe.hosts.all_hosts import load_model
from moe.serving.batch_generator import BatchGenerator, Request
from moe.serving.sampling import Sampling, sampling_of

Known = tuple[dict[str, Any], list[int]]
"""A request, and the tokens of its answer alone."""

CASE = ModelCase(vocab_size=131, d_model=32, d_ff=48, num_heads=2, num_layers=2, sparse_layers=1)
WRONG_BODIES = (
    b'{"prompt": "w2", "temperature": 1, "top_k": ' + b"9" * 309 + b"}",
    b'{"prompt": "w2", "temperature": NaN}',
    b'{"prompt": [131]}',
    b'{"prompt": "w2"',
)
_CLIENTS = 24
_HEADERS = {"content-type": "application/json"}
_LONGEST = 200  # words of a prompt
_TRY_SECONDS = 120  # for which a client tries to reach a server that starts again


@dataclass(frozen=True)
class SoakBenchmark:
    """What to send; the fields are the command's options.

    Attributes:
        json: File to save to; None for none.
        requests: How many.
        num_prompts: Different prompts.
        share: Share of requests that are wrong, and of those that their clients leave.
    """

    json: Path | None
    requests: int = 20_000
    num_prompts: int = 60
    share: float = 0.01


def run_soak(benchmark: SoakBenchmark) -> None:
    """Sends all requests, prints the outcomes and saves them.

    Raises:
        DataError: When an answer differs or is missing, or a wrong request is not refused.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder)
        known = answer_alone(folder, benchmark.num_prompts)
        report = describe_machine(torch.device("cpu")) | send_all(benchmark, known, folder)
    save_report(report, benchmark.json)
    print_report(json.dumps(report, indent=1), benchmark.json)
    wrong = {name: report[name] for name in ("unequal", "failed", "left_open")}
    if any(wrong.values()):
        raise DataError(f"The soak has {wrong}; expected none. Read the output of the server.")


def save_model(folder: Path) -> None:
    """Saves a model with random weights, and a tokenizer of numbered words."""
    torch.manual_seed(0)
    model = build_models(CASE, 4)["ours"]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)  # so that greedy answers do not repeat one token
    model.save_pretrained(folder)
    words = {"<pad>": 0, "</s>": 1, **{f"w{index}": index for index in range(2, CASE.vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="</s>"
    ).save_pretrained(folder)


def answer_alone(folder: Path, num_prompts: int) -> list[Known]:
    """Returns different requests, greedy and sampled, whole and streamed, and their tokens."""
    draw = random.Random(0)
    bodies: list[dict[str, Any]] = []
    requests: list[Request] = []
    for number in range(2 * num_prompts):
        length = round(_LONGEST ** draw.random())
        text = " ".join(f"w{draw.randrange(2, CASE.vocab_size)}" for _ in range(length))
        sampling = Sampling(draw.randint(1, 12), 1.5 * (number % 2), top_k=50, seed=number)
        requests.append(Request(text, sampling_of(sampling, 0)))
        fields = {name: getattr(sampling, name) for name in ("temperature", "top_k", "seed")}
        body = {"prompt": text, "max_tokens": sampling.max_new_tokens, **fields}
        bodies.append({**body, "stream": number % 4 < 2, "return_token_ids": True})

    model = load_model(folder, dropless=True).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    answers = BatchGenerator(model, tokenizer, max_batch=1).map(requests)
    return [(body, answer.tokens) for body, answer in zip(bodies, answers, strict=True)]


class Server:
    """`stmoe serve` in a process that can be ended and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self._command = [sys.executable, "-m", "stmoe", "serve", "--model", str(folder)]
        self._command += ["--port", str(self._port)]
        self.start()

    def start(self) -> None:
        """Starts the process, and waits until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        self.send("GET", "/health")

    def end(self) -> None:
        """Sends SIGTERM, at which the server answers what is open and exits with 0."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(_TRY_SECONDS) == 0, "the server did not exit with 0"

    def resident_mb(self) -> int:
        """Returns the resident memory of the process."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * 4096 // 10**6

    def send(self, method: str, path: str, body: bytes = b"", *, leaves: bool = False) -> Any:
        """Returns the status and body of a response; a client that leaves does not wait for it."""
        give_up = time.monotonic() + _TRY_SECONDS
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TRY_SECONDS)
            try:
                connection.request(method, path, body, _HEADERS)
                if leaves:
                    return 0, b""
                response = connection.getresponse()
                return response.status, response.read()
            except ConnectionError:  # ended, or not started yet; nothing was answered
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)
            finally:
                connection.close()


def ask(server: Server, known: list[Known], share: float, number: int) -> str:
    """Sends the request of a number, and returns how it ended."""
    draw = random.Random(number)
    kind = draw.random()
    body, tokens = draw.choice(known)
    data = draw.choice(WRONG_BODIES) if kind < share else json.dumps(body).encode()
    leaves = share <= kind < 2 * share
    try:
        status, content = server.send("POST", "/v1/completions", data, leaves=leaves)
    except (OSError, http.client.HTTPException):
        return "failed"
    if leaves or kind < share:
        return "left" if leaves else "refused" if status == 400 else "failed"
    if status != 200:
        return "failed"

    received: list[int] = []
    for event in content.decode().removesuffix("data: [DONE]\n\n").strip().split("\n\n"):
        for choice in json.loads(event.removeprefix("data: ")).get("choices", []):
            received += choice["token_ids"]
    return "equal" if received == tokens else "unequal"


def send_all(benchmark: SoakBenchmark, known: list[Known], folder: Path) -> dict[str, Any]:
    """Returns the number of each outcome, and the server's memory after every twentieth."""
    outcomes: Counter[str] = Counter(equal=0, unequal=0, refused=0, left=0, failed=0)
    memory: list[list[int]] = [[]]
    begin = time.monotonic()
    server = Server(folder)
    try:
        with ThreadPoolExecutor(_CLIENTS) as pool:
            ended = pool.map(
                partial(ask, server, known, benchmark.share), range(benchmark.requests)
            )
            progress = tqdm(ended, total=benchmark.requests, desc="soak", mininterval=1.0)
            for number, outcome in enumerate(progress, start=1):
                outcomes[outcome] += 1
                if number % max(1, benchmark.requests // 20) == 0:
                    memory[-1].append(server.resident_mb())
                if number == benchmark.requests // 2:  # clients try again until it answers
                    server.end()
                    server.start()
                    memory.append([])
        time.sleep(1.0)  # in which the server forgets what its last clients have left
        left_open = json.loads(server.send("GET", "/health")[1])["open"]
    finally:
        server.end()
    counts = {"requests": benchmark.requests, **outcomes, "left_open": left_open}
    return counts | {"memory_mb": memory, "seconds": round(time.monotonic() - begin)}
