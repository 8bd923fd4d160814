"""`v41jax generate --prompts`: what a line may hold, and faults that name file and line."""

import json

import pytest

from v41jax.commands.generate import PromptsError, engine_prompts, located_prompts, read_prompts
from v41jax.engine import Prompt


class RecordingEngine:
    """Remembers how prompts were made."""

    def prompt(self, content, sampling):
        for token in content:
            if token > 500:
                raise ValueError(f"token id {token} is outside 0..500")
        return Prompt(tuple(content), sampling)

    def prompt_with_images(self, content, images, sampling):
        self.images = images
        return Prompt(tuple(content), sampling)


def test_images_are_read_in_order(tmp_path):
    (tmp_path / "a.png").write_bytes(b"first")
    (tmp_path / "b.png").write_bytes(b"second")
    line = {"tokens": [5, 500, 500], "images": [str(tmp_path / "a.png"), str(tmp_path / "b.png")], "seed": 3}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({**line, "arrival_step": 2}))
    engine = RecordingEngine()
    (prompt,) = engine_prompts(engine, located_prompts(tmp_path / "prompts.jsonl"), {}, True)
    assert engine.images == [b"first", b"second"]
    assert (prompt.tokens, prompt.sampling.seed, prompt.arrival_step) == ((5, 500, 500), 3, 2)


@pytest.mark.parametrize("images", ["a.png", [1]])
def test_images_that_are_no_file_names_are_a_fault(tmp_path, images):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"tokens": [5], "images": images}))
    with pytest.raises(PromptsError, match="images"):
        read_prompts(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": 5}', "prompt 5 must be text"),
        ('{"prompt": null}', "give either prompt"),
        ('{"prompt": "a", "tokens": [1]}', "give either prompt"),
        ('{"tokens": 5}', "tokens must be a list of token ids"),
        ('{"tokens": [[1]]}', "tokens must be a list of token ids"),
        ('{"tokens": [1.5]}', "tokens must be a list of token ids"),
        ('{"tokens": [true]}', "tokens must be a list of token ids"),
        ('{"tokens": []}', "tokens is empty"),
        ('{"tokens": [1], "temperature": NaN}', "temperature nan must be"),
        ('{"tokens": [1], "temperature": Infinity}', "temperature inf must be"),
        ('{"tokens": [1], "top_p": "x"}', "top_p 'x' must be"),
        ('{"tokens": [1], "top_k": 1099511627776}', "top_k 1099511627776 must be"),
        ('{"tokens": [1], "seed": 4294967296}', "seed 4294967296 must be"),
        ('{"tokens": [1], "max_tokens": 0}', "max_tokens 0 must be"),
        ('{"tokens": [1], "arrival_step": -1}', "arrival_step -1 must be"),
        ('{"tokens": [1], "stop": "x"}', "unknown keys stop"),
        ('{"tokens": [1]', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('"text"', "a line must hold a JSON object"),
        ("\xff", "not JSON"),
    ],
)
def test_every_fault_names_file_and_line(tmp_path, line, fault):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\n{"tokens": [1]}\n' + line.encode("latin-1") + b'\n{"tokens": 1, "seed": -1}\n')
    with pytest.raises(PromptsError) as caught:
        read_prompts(file)
    assert caught.value.faults[0].startswith(f"{file}:3: {fault}")
    assert [found.partition(": ")[0] for found in caught.value.faults[-2:]] == [f"{file}:4"] * 2


def test_a_line_separator_inside_a_text_does_not_end_its_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_prompts(file) == [{"prompt": "a\u2028b\x85c"}]


def test_a_null_is_an_absent_option(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"tokens": [1], "prompt": null, "max_tokens": null, "seed": null}')
    (prompt,) = engine_prompts(RecordingEngine(), located_prompts(file), {"max_tokens": 7, "seed": 4}, False)
    assert (prompt.sampling.max_tokens, prompt.sampling.seed) == (7, 4)


def test_every_request_the_model_cannot_take_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"tokens": [501]}\n{"tokens": [1]}\n{"tokens": [2, 777]}\n{"tokens": [1], "images": ["gone"]}')
    with pytest.raises(PromptsError) as caught:
        engine_prompts(RecordingEngine(), located_prompts(file), {}, False)
    assert caught.value.faults == (
        f"{file}:1: token id 501 is outside 0..500",
        f"{file}:3: token id 777 is outside 0..500",
        f"{file}:4: gone: No such file or directory",
    )
