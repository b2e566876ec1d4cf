"""Configurations of Hugging Face folders and GGUF files: all end tokens united, nothing unknown accepted."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.backends import CPU
from tests.support.tiny import END_TOKEN, Tiny, edit, write_tiny
from tests.support.tiny_gguf import write_gguf, write_tiny_gguf
from twostroke.engine.config import RopeConfig, RopeScaling
from twostroke.engine.rope import inverse_frequencies, rotation
from twostroke.engine.weights import read_config
from twostroke.errors import ModelError, UnsupportedModel

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def test_end_tokens_are_the_union_of_all_sources_of_a_folder(tmp_path: Path) -> None:
    folder = edit(write_tiny(tmp_path), eos_token_id=[2, 7])
    edit(folder, "generation_config.json", eos_token_id=9)
    edit(
        folder,
        "tokenizer_config.json",
        eos_token={"content": "<end>"},
        added_tokens_decoder={"11": {"content": "<end>"}},
    )
    assert read_config(folder).end_token_ids == {2, 7, 9, 11}


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 13, "content": "<end>"}]},
        {"added_tokens": [], "model": {"vocab": {"<end>": 13}}},
    ],
)
def test_the_tokenizers_end_token_is_found_wherever_its_id_stands(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    folder = edit(write_tiny(tmp_path), eos_token_id=None)
    edit(folder, "generation_config.json", eos_token_id=None)
    edit(folder, "tokenizer_config.json", eos_token="<end>")
    edit(folder, "tokenizer.json", **tokenizer)
    assert read_config(folder).end_token_ids == {13}


def test_end_tokens_of_a_gguf_file_are_text_turn_and_message(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 5}
    assert read_config(write_gguf(tmp_path / "m.gguf", **ids)).end_token_ids == {END_TOKEN, 3, 5}


def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"\[99999\] lie outside the vocabulary of 272"):
        read_config(edit(write_tiny(tmp_path), eos_token_id=99_999))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "architecture gemma2"),
        ({"model_type": "gemma3", "text_config": {}, "vision_config": {}}, "architecture gemma3 with images"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 64}, "sliding_window of 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}, "for each kind of layer"),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "yarn"}}, "rope type yarn"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_config(edit(write_tiny(tmp_path), **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is not a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is not a number that a float can hold"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is not a number that a float can hold"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "does not say factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope factor is 0; it must lie between"),
        ({"model_type": "mistral", "sliding_window": 0}, "not a positive number"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "without a sliding_window"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"layer_types": "full_attention"}, "not a list of strings"),
    ],
)
def test_a_contradictory_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(edit(write_tiny(tmp_path), **changes))


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_a_damaged_config_file_is_a_typed_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"general.architecture": "gemma2"}, None),
        ({"llama.expert_count": 8}, "expert_count of 8"),
        ({"llama.rope.scaling.type": "yarn"}, "rope type yarn"),
        ({"llama.rope.dimension_count": 8}, "dimension_count of 8"),
        ({"llama.attention.sliding_window": 64}, "sliding window of 64"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping of 30"),
    ],
)
def test_gguf_settings_the_engine_does_not_have_are_refused(
    tmp_path: Path, values: dict[str, Any], message: str | None
) -> None:
    if message is None:
        path = tmp_path / "other.gguf"
        writer = gguf.GGUFWriter(path, "gemma2")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        message = "architecture gemma2"
    else:
        path = write_gguf(tmp_path / "m.gguf", **values)
    with pytest.raises(UnsupportedModel, match=message):
        read_config(path)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3, {"type": "linear", "factor": 4.0}, LLAMA3 | {"type": "llama3"}])
def test_frequencies_equal_transformers_for_every_scaling_and_spelling(
    tmp_path: Path, scaling: dict[str, Any], key: str
) -> None:
    folder = edit(write_tiny(tmp_path, theta=500_000.0), rope_scaling=None)
    config = read_config(edit(folder, **{key: scaling}))
    kind = config.rope.scaling.value
    peer = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=2_048)
    peer.rope_parameters = scaling | {"rope_type": kind, "rope_theta": 500_000.0}
    expected, factor = ROPE_INIT_FUNCTIONS[kind](peer, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(config.rope, config.head_dim), expected, atol=0, rtol=1e-6)
    assert factor == 1.0


def test_rope_parameters_may_carry_theta(tmp_path: Path) -> None:
    folder = edit(write_tiny(tmp_path), rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_config(folder).rope == RopeConfig(theta=5e5)


def test_the_frequency_divisors_of_a_gguf_file_are_used(tmp_path: Path) -> None:
    found = read_config(write_tiny_gguf(tmp_path / "m.gguf", rope=LLAMA3))
    expected = read_config(write_tiny(tmp_path / "m", rope=LLAMA3))
    assert found.rope.divisors is not None
    torch.testing.assert_close(
        inverse_frequencies(found.rope, 16), inverse_frequencies(expected.rope, 16), atol=0, rtol=1e-5
    )


def test_linear_scaling_of_a_gguf_file_is_read_in_both_spellings(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    named = read_config(write_tiny_gguf(tmp_path / "m.gguf", rope=LINEAR)).rope
    legacy = read_config(write_gguf(tmp_path / "new" / "m.gguf", **{"llama.rope.scale_linear": 4.0})).rope
    assert named == legacy == RopeConfig(scaling=RopeScaling.LINEAR, factor=4.0)


def test_rotation_far_out_keeps_the_angle_of_float64() -> None:
    rope = RopeConfig(theta=500_000.0)
    frequencies = inverse_frequencies(rope, 64)
    cos, sin = rotation(frequencies, torch.tensor([9_000])).chunk(2, dim=-1)
    angles = 9_000 * frequencies.double()
    torch.testing.assert_close(cos[0].double(), angles.cos(), atol=1e-3, rtol=0)
    torch.testing.assert_close(sin[0].double(), angles.sin(), atol=1e-3, rtol=0)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    frequencies = inverse_frequencies(RopeConfig(), 16)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def turned(head: torch.Tensor, at: int) -> torch.Tensor:
        copy = head.clone()
        CPU.rotate(copy, rotation(frequencies, torch.tensor([at])))
        return copy

    def score(at_q: int, at_k: int) -> torch.Tensor:
        return torch.linalg.vecdot(turned(q, at_q), turned(k, at_k))

    torch.testing.assert_close(score(40, 33), score(1_007, 1_000), atol=1e-4, rtol=0)
    torch.testing.assert_close(turned(q, 99).norm(), q.norm())


def test_digests_tell_rope_settings_apart() -> None:
    ropes = [RopeConfig(), RopeConfig(theta=5e5), RopeConfig(scaling=RopeScaling.LINEAR, factor=2.0)]
    ropes += [RopeConfig(scaling=RopeScaling.LINEAR, factor=4.0), RopeConfig(divisors=(1.0, 2.0))]
    assert len({rope.digest for rope in ropes}) == len(ropes)
    assert all(len(rope.digest) == 16 for rope in ropes)


def test_a_tiny_config_says_what_was_written(tmp_path: Path) -> None:
    config, tiny = read_config(write_tiny(tmp_path, family="qwen2")), Tiny()
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (tiny.vocab, tiny.hidden, tiny.layers)
    assert (config.attention_bias, config.output_bias, config.architecture) == (True, False, "qwen2")
