"""`v41jax generate --prompts`: images of a prompt, named by file."""

import json

import pytest

from v41jax.commands.generate import PromptsError, _prompt, read_prompts
from v41jax.engine import Prompt


class RecordingEngine:
    """Remembers how prompts were made."""

    def prompt(self, content, sampling):
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
    prompt = _prompt(engine, read_prompts(tmp_path / "prompts.jsonl")[0], True)
    assert engine.images == [b"first", b"second"]
    assert (prompt.tokens, prompt.sampling.seed, prompt.arrival_step) == ((5, 500, 500), 3, 2)


@pytest.mark.parametrize("images", ["a.png", [1]])
def test_images_that_are_no_file_names_are_a_fault(tmp_path, images):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"tokens": [5], "images": images}))
    with pytest.raises(PromptsError, match="images"):
        read_prompts(tmp_path / "prompts.jsonl")
