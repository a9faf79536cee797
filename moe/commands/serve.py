r"""stmoe serve: an HTTP server that speaks OpenAI's completions API.

stmoe serve --model names
curl localhost:8000/v1/completions -H 'content-type: application/json' \
  -d '{"prompt": "el: New Zealand", "stream": true}'
"""

import socket
from ipaddress import ip_address
from pathlib import Path

from moe.checks import check
from moe.cli import Parser, integer, real
from moe.commands.served_model import add_model_options
from moe.errors import ConfigError
from moe.hosts.answering import load
from moe.serving.sampling import Sampling


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe serve", description="Answers texts over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument(
        "--port", type=integer(least=0, most=65535, reason="ports end there"), default=8000
    )
    parser.add_argument(
        "--max-batch", type=integer(least=1), default=32, help="texts answered at once (32)"
    )
    parser.add_argument(
        "--queue", type=integer(least=1), default=1024, help="open requests; more get 503 (1024)"
    )
    add_model_options(parser)
    parser.add_argument(
        "--max-new-tokens", type=integer(least=1), default=256, help="longest answer (256)"
    )
    parser.add_argument(
        "--timeout", type=real(above=0), default=120.0, help="seconds for a request (120)"
    )
    return parser


def main(argv: list[str]) -> None:
    """Serves a model until the process is told to end.

    Raises:
        CheckpointError: When the model is missing or damaged.
        ConfigError: When starlette and uvicorn are missing, or the model is not supported.
        OSError: When the address cannot be used.
    """
    options = build_parser().parse_args(argv)
    try:
        from moe.serving.server import CompletionServer, run_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"stmoe serve needs starlette and uvicorn: pip install 'stmoe[serve]'. ({error})"
        ) from error

    # The address first: it is refused at once, not after the model was loaded.
    check(bool(options.host), "--host", options.host, "an address, e.g. 0.0.0.0 for all of them")
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
    host, port = listener.getsockname()[:2]
    # A page on the web cannot reach a local server by a name of its own.
    hosts = ("localhost", "127.0.0.1", "[::1]", options.host)
    server = CompletionServer(
        load(
            options.model,
            mmap=options.mmap,
            pack=True,
            source_language=options.source_language,
            target_language=options.target_language,
            max_batch=options.max_batch,
            max_input=options.max_input,
            **vars(Sampling(max_new_tokens=options.max_new_tokens)),
        ),
        Path(options.model).resolve().name,
        max_open=options.queue,
        timeout=options.timeout,
        hosts=hosts if ip_address(host).is_loopback else ("*",),
    )
    print(f"Serving {options.model} at http://{host}:{port}. Ctrl-C ends it.", flush=True)
    run_server(server, listener)
