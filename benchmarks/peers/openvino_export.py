"""A Hugging Face folder as an OpenVINO model, by optimum-intel in OpenVINO's environment: FOLDER TARGET FORMAT.

It needs no network. The format is optimum's name for that of weights: fp16, or int8 with a scale per row. GenAI loads
no model without a tokenizer; a folder that has none gets one of single bytes, which is never asked, because prompts
are token ids.
"""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def export(folder: Path, target: Path, weights: str) -> None:
    """Writes the model and the tokenizer into a folder.

    Raises:
        subprocess.CalledProcessError: optimum-intel cannot convert the model.
    """
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(folder)]
    command += ["--task", "text-generation-with-past", "--weight-format", weights, str(target)]
    subprocess.run(command, check=True)
    if not (target / "openvino_tokenizer.xml").exists():
        _write_byte_tokenizer(target)


def _write_byte_tokenizer(target: Path) -> None:
    openvino: Any = import_module("openvino")
    tokenizers: Any = import_module("tokenizers")
    transformers: Any = import_module("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    pair = import_module("openvino_tokenizers").convert_tokenizer(fast, with_detokenizer=True)
    for model, name in zip(pair, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
        openvino.save_model(model, target / f"{name}.xml")


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
