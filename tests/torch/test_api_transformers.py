"""A converted model of Transformers writes the files of the plain one, and generates by its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from api_setup import FP8, PLAIN, REFERENCE, Recorder

from mxref_torch import convert
from mxref_torch.errors import LayerError


def llama(tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_a_converted_model_writes_and_reads_the_files_of_the_plain_one(tied: bool, tmp_path: Path) -> None:
    for name in ("plain", "converted"):
        model = llama(tied)
        if name == "converted":
            convert(model, FP8, backend=REFERENCE)
        model.save_pretrained(tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "converted")]
    assert files[0] == files[1]
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    with pytest.raises(LayerError, match=r"weight is torch.bfloat16: .* call model.float"):
        convert(again.bfloat16(), FP8, backend=REFERENCE)


def test_a_cache_changes_no_generated_token() -> None:
    """Blocks of Fprop lie along the features, so a token's codes do not depend on the tokens beside it."""
    backend = Recorder()
    model = llama(True)
    convert(model, PLAIN, backend=backend)
    prompt = torch.arange(4).unsqueeze(0)
    cached, whole = (
        model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=cache) for cache in (True, False)
    )
    assert cached.shape == (1, 8)
    assert torch.equal(cached, whole)
    assert backend.products
