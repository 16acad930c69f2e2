"""Mistakes with configurations and runs: `tk train`, `tk plan`, `tk plot`, `tk parity` and `tk doctor`."""

from typing import Final

from tk.tests.cli.mistakes.mistake import Mistake
from tk.tests.cli.mistakes.world import CONFIG

_LARGE: Final = "--set model.num_hidden_layers=24 --set model.hidden_size=2048 --set model.num_attention_heads=16"
_DEMO: Final = "--set checkpoint.dir=runs/demo"

OF_RUNS: Final[dict[str, Mistake]] = {
    "a command with a typo": Mistake(
        "trian train.toml", 2, "no such command", "'trian'", "did you mean 'train'", "no-such-command"
    ),
    "an option of another trainer": Mistake(
        "train train.toml --epochs 3", 2, "no such option", "--epochs", "--set train.steps", "no-such-option"
    ),
    "a configuration that does not exist": Mistake(
        "train nowhere.toml", 2, "cannot read", r"nowhere\.toml", "name a TOML file", "cannot-read-the-configuration"
    ),
    "a folder for a configuration": Mistake(
        "train runs/demo", 2, "is a directory", "runs/demo", "not its folder", "cannot-read-the-configuration"
    ),
    "YAML": Mistake(
        "train run.toml",
        2,
        "looks like YAML",
        r"run\.toml.*line 1",
        r"\[train\].*steps = 20",
        "is-not-valid-toml",
        files={"run.toml": "train:\n  steps: 20\n"},
    ),
    "a text without quotes": Mistake(
        "train bare.toml",
        2,
        "invalid value",
        r"bare\.toml.*line 24",
        "stands in quotes",
        "is-not-valid-toml",
        files={"bare.toml": CONFIG.replace('"runs/new"', "runs/new")},
    ),
    "a key with a typo": Mistake(
        "train typo.toml",
        2,
        "unknown key",
        r"typo\.toml.*train\.stepps",
        "did you mean 'steps'",
        "unknown-key",
        files={"typo.toml": CONFIG.replace("steps = 20", "stepps = 20")},
    ),
    "a key of another trainer": Mistake(
        "train train.toml --set train.learning_rate=3e-4",
        2,
        "unknown key",
        r"train\.learning_rate",
        r"did you mean 'optimizer\.lr'",
        "unknown-key",
    ),
    "a GPU that is asked for": Mistake(
        "train train.toml --set train.device=cuda",
        2,
        "unknown key",
        r"train\.device",
        "CUDA_VISIBLE_DEVICES.*CPUs if there are none",
        "gpus-are-not-used",
    ),
    "an override without its section": Mistake(
        "train train.toml --set steps=50", 2, "unknown key", "'steps'", r"did you mean 'train\.steps'", "unknown-key"
    ),
    "a number in quotes": Mistake(
        "train quoted.toml",
        2,
        "should be a valid integer",
        r"quoted\.toml.*train\.steps",
        "without quotes",
        "input-should-be",
        files={"quoted.toml": CONFIG.replace("steps = 20", 'steps = "20"')},
    ),
    "a dtype by torch's name": Mistake(
        "train train.toml --set precision.params=bfloat16",
        2,
        "input should be",
        r"precision\.params.*bfloat16",
        "'fp32', 'bf16' or 'fp16'",
        "input-should-be",
    ),
    "no data": Mistake(
        "train no-data.toml",
        2,
        "no data to train on",
        r"no-data\.toml.*data\.sources",
        "tk data prepare.*path = ",
        "no-data-to-train-on",
        files={"no-data.toml": CONFIG.replace('[{ path = "tokens" }]', "[]")},
    ),
    "text for tokens": Mistake(
        "train raw.toml",
        2,
        "is a file",
        r"\[data\] sources: books/a\.txt",
        "tk data prepare",
        "must-be-a-token-folder",
        files={"raw.toml": CONFIG.replace('"tokens"', '"books/a.txt"')},
    ),
    "rows that are longer than the model": Mistake(
        "train train.toml --set train.seq_len=128",
        2,
        "exceeds",
        r"train\.seq_len = 128.*max_position_embeddings",
        "lower the first",
        "exceeds-max_position_embeddings",
    ),
    "a vocabulary that is too small for the tokenizer": Mistake(
        "train train.toml --set model.vocab_size=256",
        2,
        "301 tokens, more than",
        r"\[model\] vocab_size = 256",
        "leave that key out",
        "vocabulary",
    ),
    "tp that does not divide heads": Mistake(
        "train train.toml --set parallel.tp=3",
        2,
        "does not fit",
        r"q_proj.*num_attention_heads",
        "fits tp = 1 or 2 or 4",
        "does-not-fit",
    ),
    "ranks that no layout has": Mistake(
        "train train.toml --set parallel.tp=2 --nproc 3",
        2,
        "must be 0",
        r"\[parallel\]: the number of ranks",
        "start a multiple of 2 ranks",
        "number-of-ranks",
    ),
    "two batch sizes": Mistake(
        "train train.toml --deepspeed ds.json",
        2,
        "sets it to 6",
        r"ds\.json.*train_batch_size|train_batch_size of ds\.json",
        "remove one of the two",
        "deepspeed",
        files={"ds.json": '{"train_batch_size": 6}'},
    ),
    "more memory than there is": Mistake(
        f"train train.toml {_LARGE} --set train.micro_batch_size=4096 --set train.global_batch_size=4096",
        2,
        "and this machine has",
        "largest part is activations",
        r"use \[train\] micro_batch_size = 1: that needs",
        "needs-memory",
    ),
    "a memory that no offload reaches": Mistake(
        "plan train.toml --fit 100KiB --device cpu",
        1,
        "nothing fits into 100 KiB",
        "largest part left is",
        "a rank needs",
        "needs-memory",
    ),
    "a size with a space": Mistake(
        "plan train.toml --fit '24 gigs'", 2, "is not a size", "--fit", "512MiB, 2GiB", "is-not-a-size"
    ),
    "another model in the run's folder": Mistake(
        f"train train.toml {_DEMO} --set model.hidden_size=64",
        2,
        "continues with the model that it began with",
        r"step-00000002 has model\.hidden_size = 32",
        "give the new run another folder",
        "a-run-continues-with",
    ),
    "a new run in an old folder": Mistake(
        f"train train.toml {_DEMO} --resume never",
        2,
        "would not continue",
        "runs/demo holds step 2",
        "name another .* dir, or use `--resume auto`",
        "a-run-continues-with",
    ),
    "the folder of all runs": Mistake(
        "train train.toml --resume runs",
        3,
        "holds no checkpoint itself",
        "runs ",
        r"e\.g\. runs/demo",
        "holds-no-checkpoint",
    ),
    "a learning rate that is too high": Mistake(
        "train train.toml --set optimizer.lr=1e30 --set checkpoint.dir=runs/nan --set optimizer.warmup_steps=0",
        1,
        "not finite",
        "step [0-9]",
        "lower|clip|on_nonfinite",
        "is-not-finite",
    ),
    "TensorBoard without its extra": Mistake(
        "train train.toml --set metrics.tensorboard=true",
        2,
        "needs the extra `tensorboard`",
        r"\[metrics\] tensorboard",
        "pip install",
        "needs-the-extra",
        absent="tensorboard",
    ),
    "a plot of a folder without a run": Mistake(
        "plot models/base",
        2,
        "cannot read",
        r"models/base/metrics\.jsonl",
        "name the run folder",
        "cannot-read-metrics",
    ),
    "a PNG without its extra": Mistake(
        "plot runs/demo -o curves.png",
        2,
        "needs the extra `plot`",
        r"curves\.png",
        "pip install 'resvg",
        "needs-the-extra",
        absent="resvg_py",
    ),
    "a layout with a typo": Mistake(
        "parity --layouts layouts.toml",
        2,
        "unknown key 'tpp'",
        r"layouts\.toml, layout 1",
        "did you mean 'tp'",
        "unknown-key",
        files={"layouts.toml": "[[layouts]]\ntpp = 2\n"},
    ),
    "too little shared memory": Mistake(
        "doctor",
        0,
        r"/dev/shm [^/]* note",
        "/dev/shm",
        "docker run --shm-size",
        "devshm",
        changed=("tk.cli.machine._SMALL_SHM", 1 << 60),
        processes=True,
    ),
    "a file for a folder": Mistake("doctor --disk train.toml", 2, "is a file", "'--disk'", "directory", "is-a-file"),
}
