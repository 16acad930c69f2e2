"""The reader of shell scripts, and click's reading of tk's commands."""

import pytest

from tk.tests.docs.shell import commands, here_documents, parse, tk_words

SCRIPT = """\
. env/bin/activate && tk doctor      # what is missing
KEY=value tk generate a "two words" > out.txt
cat > run.toml <<EOF
train = "tk"
EOF
TOKEN=$(cat a.token) tk top \\
  host:1 | head
"""


def test_a_script_is_read_as_a_shell_reads_it() -> None:
    assert list(commands(SCRIPT)) == [
        [".", "env/bin/activate"],
        ["tk", "doctor"],
        ["tk", "generate", "a", "two words"],
        ["cat"],
        ["cat", "a.token"],
        ["tk", "top", "host:1"],
        ["head"],
    ]
    assert here_documents(SCRIPT) == [("run.toml", 'train = "tk"\n')]


def test_tk_is_found_however_it_is_called() -> None:
    assert tk_words(["/opt/tk/bin/tk", "top", "a:1"]) == ["top", "a:1"]
    assert tk_words(["RUN", "tk", "doctor"]) == ["doctor"]
    assert tk_words(["torchrun", "--nnodes", "2", "-m", "tk", "train", "a"]) == ["train", "a"]
    assert tk_words(["make", "tk"]) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve a --block-size 3", "No such option"),
        ("serve a --kv-dtype int3", "Invalid value for '--kv-dtype'"),
        ("serve a b", "unexpected extra argument"),
        ("reshard a b", "Missing option '--tp'"),
        ("verify", "Missing argument"),
        ("bench", "A command is missing"),
        ("bench train a", "No such command 'train'"),
        ("sevre a", "No such command 'sevre'"),
    ],
)
def test_wrong_words_are_refused(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(words.split())


def test_right_words_are_read() -> None:
    assert parse(["generate", "a:1", "hello", "--tls-ca", "no/such.pem", "--debug"]).params["prompt"] == "hello"
    assert parse(["bench", "serve", "a:1", "--rate", "4"]).params["rate"] == 4
