"""Mistakes with served models: `tk serve`, `tk generate`, `tk top`, `tk bench`, `tk token` and `tk eval`."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from tk.cli.main import main
from tk.tests.cli.mistakes.mistake import Mistake, Prepare
from tk.tests.cli.mistakes.servers import CA, OTHER_CA, TOKENS
from tk.tests.infer.adapters import make_adapter

_NO_TOKEN: Final = {"TK_TOKEN": "withdrawn"}


def _model(name: str, **keys: Any) -> Prepare:
    """Returns what copies a model with other keys in its config.json."""

    def prepare(world: Path) -> None:
        folder = shutil.copytree(world / "models" / "base", world / "models" / name)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return prepare


def _make_tokens(world: Path) -> None:
    """Makes a file of tokens with one caller."""
    assert main(["token", "alice", "--tokens", str(world / TOKENS)]) == 0


def _make_adapter(world: Path) -> None:
    """Makes an adapter of the wider model."""
    make_adapter(world / "runs" / "sql", world / "models" / "wide")


OF_SERVERS: Final[dict[str, Mistake]] = {
    "a busy port": Mistake(
        "serve runs/demo --port {port}",
        2,
        "the port is in use",
        r"127\.0\.0\.1:\d+ \(--port\)",
        "--port 0 takes a free one",
        "cannot-listen",
        server="taken",
    ),
    "a busy port of HTTP": Mistake(
        "serve runs/demo --port 0 --http {port}",
        2,
        "the port is in use",
        r"\(--http\)",
        "--http 0 takes a free one",
        "cannot-listen",
        server="taken",
    ),
    "an address with its port": Mistake(
        "serve runs/demo --host 127.0.0.1:8000",
        2,
        "holds a port",
        "host = '127.0.0.1:8000'",
        "--host 127.0.0.1 --port 8000",
        "cannot-listen",
    ),
    "an open address": Mistake(
        "serve runs/demo --host 0.0.0.0",
        2,
        "can be reached from other machines",
        "host = '0.0.0.0'",
        "--tls-cert.*--insecure",
        "can-be-reached-from-other-machines",
    ),
    "a certificate without its key": Mistake(
        "serve runs/demo --tls-cert server.pem", 2, "TLS needs", "--tls-cert and --tls-key", "both", "tls"
    ),
    "tokens that were never made": Mistake(
        "serve runs/demo --port 0 --tokens nowhere.txt",
        2,
        "does not exist",
        r"nowhere\.txt",
        "tk token NAME --tokens nowhere",
        "needs-a-token",
    ),
    "too little memory for the cache": Mistake(
        "serve runs/demo --port 0 --kv-memory 512",
        2,
        "is too little",
        "512 B for the KV cache",
        "raise kv_memory",
        "kv-cache",
    ),
    "more memory for the cache than there is": Mistake(
        "serve runs/demo --port 0 --kv-memory 512TiB",
        2,
        "this machine.* has .* free",
        r"KV cache \(512 TiB\)",
        "lower kv_memory",
        "kv-cache",
    ),
    "a context that the model does not have": Mistake(
        "serve runs/demo --port 0 --max-model-len 4096",
        2,
        "more than the model's",
        "max_model_len = 4096",
        "lower it",
        "exceeds-max_position_embeddings",
    ),
    "an unknown dtype": Mistake(
        "serve runs/demo --port 0 --kv-dtype fp4",
        2,
        "is not one of",
        "'--kv-dtype': 'fp4'",
        "'fp8', 'int8', 'int4'",
        "is-not-one-of",
    ),
    "an architecture that tk lacks": Mistake(
        "serve models/mamba --port 0",
        3,
        "model_type 'mamba' is not supported",
        r"mamba/config\.json",
        "supported are .*llama",
        "is-not-supported",
        prepare=_model("mamba", architectures=["MambaForCausalLM"], model_type="mamba"),
    ),
    "weights that another program quantized": Mistake(
        "serve models/gptq --port 0",
        3,
        r"quantized \(gptq\)",
        r"gptq/config\.json",
        "in bf16 or fp16.*--weight-dtype",
        "weights-are-quantized",
        prepare=_model("gptq", quantization_config={"quant_method": "gptq"}),
    ),
    "config.json of another model": Mistake(
        "serve models/mixed --port 0",
        3,
        "has shape",
        r"mixed: model\.embed_tokens\.weight",
        "copy both from one place",
        "configjson-requires",
        prepare=_model("mixed", hidden_size=64),
        processes=True,
    ),
    "an adapter of another base": Mistake(
        "serve models/base --port 0 --adapter sql=runs/sql",
        3,
        "base",
        "runs/sql",
        "name the base that it was trained on",
        "another-base",
        prepare=_make_adapter,
    ),
    "an adapter without its name": Mistake(
        "serve runs/demo --adapter runs/sql",
        2,
        "is not NAME=CKPT",
        "'--adapter': 'runs/sql'",
        "for example sql=runs/sql",
        "not-an-adapter",
    ),
    "a server that does not run": Mistake(
        "generate 127.0.0.1:1 hello",
        1,
        "no server listens there",
        r"127\.0\.0\.1:1\b",
        "start one .tk serve",
        "no-server-listens",
    ),
    "TLS that only the server has": Mistake(
        "generate {server} hello",
        1,
        "ended the connection at once",
        r"127\.0\.0\.1:\d+",
        "--tls-ca",
        "tls",
        server="tls",
    ),
    "TLS that only the client has": Mistake(
        "top {server} --once --tls",
        1,
        "is not encrypted",
        r"127\.0\.0\.1:\d+",
        "leave out --tls",
        "tls",
        server="plain",
    ),
    "a certificate of another authority": Mistake(
        f"generate {{server}} hello --tls-ca {OTHER_CA}",
        1,
        "not of an authority that this client knows",
        r"127\.0\.0\.1:\d+",
        "--tls-ca",
        "tls",
        server="tls",
    ),
    "a client without its certificate": Mistake(
        f"generate {{server}} hello --tls-ca {CA}",
        1,
        "ended the connection at once",
        r"127\.0\.0\.1:\d+",
        "--tls-cert with --tls-key",
        "tls",
        server="certificates",
    ),
    "no token": Mistake(
        "generate {server} hello",
        1,
        "needs a token",
        r"127\.0\.0\.1:\d+",
        "TK_TOKEN",
        "needs-a-token",
        server="tokens",
        prepare=_make_tokens,
    ),
    "a token that was withdrawn": Mistake(
        "generate {server} hello",
        1,
        "unknown to this server, or no longer valid",
        r"127\.0\.0\.1:\d+",
        "tk token",
        "needs-a-token",
        server="tokens",
        variables=_NO_TOKEN,
    ),
    "a server of another version": Mistake(
        "top {server} --once",
        1,
        "does not have this call",
        r"127\.0\.0\.1:\d+",
        "--admin-port.*tk --version",
        "does-not-have-this-call",
        server="old",
    ),
    "the port of HTTP": Mistake(
        "generate {server} hello",
        1,
        "not in gRPC",
        r"127\.0\.0\.1:\d+",
        "name its port of gRPC",
        "not-in-grpc",
        server="http",
    ),
    "the address of HTTP": Mistake(
        "generate http://127.0.0.1:8000/v1 hello",
        2,
        "is an address",
        "http://127",
        "HOST:PORT",
        "not-in-grpc",
    ),
    "an address without a port": Mistake(
        "bench serve localhost", 2, "is no address", "localhost", "HOST:PORT", "no-server-listens"
    ),
    "a prompt that is too long": Mistake(
        "generate {server} " + "long" * 50,
        2,
        "more than 128 tokens",
        r"127\.0\.0\.1:\d+: the text",
        "shorten it to at most 128",
        "the-prompt-is-too-long",
        server="plain",
    ),
    "an adapter that is not loaded": Mistake(
        "generate {server} hello --adapter sql",
        1,
        "is not loaded",
        "'sql'",
        "load it first, or name another",
        "not-an-adapter",
        server="plain",
    ),
    "a base model that is asked to chat": Mistake(
        "generate runs/demo hello --chat",
        3,
        "no chat template",
        r"runs/demo/step-00000002.*chat_template\.jinja",
        "add one",
        "has-no-chat-template",
    ),
    "a prompt without quotes": Mistake(
        "generate runs/demo hello world", 2, "unexpected extra argument", r"\(world\)", "needs quotes", "missing-option"
    ),
    "a name with a space": Mistake(
        "token 'team a' --tokens made.txt", 2, "cannot be the name", "'team a'", "as in team-a", "needs-a-token"
    ),
    "text to measure without a tokenizer": Mistake(
        "eval models/wide --data books/a.txt",
        2,
        r"no tokenizer\.json",
        "--data",
        "copy that file",
        "cannot-read-the-tokenizer",
    ),
    "windows that are longer than the model": Mistake(
        "eval runs/demo --data books/a.txt --context 4096",
        2,
        "more than the 64 positions",
        "--context 4096",
        "lower it to 64",
        "exceeds-max_position_embeddings",
    ),
}
