"""Errors of arguments on the command line: one line on standard error, exit code 2."""

import pytest

from v41jax.cli import main


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("generate --max-tokens abc", "'--max-tokens'"),
        ("generate --model x", "give either --prompt TEXT or --prompts FILE.jsonl"),
        ("generate", "'--model'"),
        ("generate --model x --prompt a --nope 3", "--nope"),
        ("generate --model x --prompt a --mesh data=1;model=2", "mesh 'data=1;model=2' must read data=D,model=M"),
        ("generate --model x --prompt a --max-tokens 0 --temperature -1", "max_tokens 0 must be"),
        ("logits --model a --out b --dtype float16", "'float16' is not one of"),
        ("nope", "'nope'"),
        ("checkpoint verify /nowhere", "/nowhere is not a directory"),
    ],
)
def test_an_argument_error_is_one_line(arguments, fault, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["v41jax", *arguments.split(" ")])
    with pytest.raises(SystemExit) as stopped:
        main()
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert stopped.value.code == 2 and output.out == ""
    assert fault in lines[0]
    assert all(line.startswith("error: ") for line in lines)
    assert len(lines) == (2 if "temperature" in arguments else 1)


def test_help_and_no_arguments_are_no_errors_in_words(monkeypatch, capsys):
    for arguments, code in ((["--help"], 0), ([], 2)):
        monkeypatch.setattr("sys.argv", ["v41jax", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == code
        output = capsys.readouterr()
        assert "generate" in output.out + output.err and "error:" not in output.err
