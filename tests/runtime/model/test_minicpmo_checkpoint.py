"""Loading a checkpoint: what fits is taken whole, and what does not is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.model.backends.minicpmo.checkpoint import (
    INDEX,
    LISTED_MAX,
    WEIGHTS,
    CheckpointError,
    Parts,
    load_parts,
    weight_files,
)
from runtime.model.backends.minicpmo.config import ModelConfig, load_config, read_config
from runtime.model.backends.minicpmo.model import VOCODER, DuplexModel
from runtime.model.backends.minicpmo.tokens import Tokens
from tests.models import random_model
from tests.models.random_model import CONFIG, SMALL, changed

HEAD = "llm.lm_head.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.write_checkpoint(tmp_path_factory.mktemp("model"), SMALL)


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(published, tmp_path / "model"))


def load(folder: Path) -> Parts:
    return load_parts(load_config(folder / "config.json"), folder)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace some weights, or leave them out where None."""
    state: dict[str, Any] = {**load_file(folder / WEIGHTS), **changes}
    save_file({key: value for key, value in state.items() if value is not None}, folder / WEIGHTS)


# -- weights --------------------------------------------------------------------------------------


def test_every_weight_is_loaded(folder: Path) -> None:
    """Parts of the model would be left at chance."""
    state = load_file(folder / WEIGHTS)
    parts = load(folder)
    assert set(parts.state_dict()) == set(state)
    for key, value in parts.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert not any(value.requires_grad for value in parts.parameters())
    assert not parts.training


def test_the_keys_are_the_published_ones(folder: Path) -> None:
    """The published checkpoint would not load."""
    keys = set(load_file(folder / WEIGHTS))
    for key in (
        "llm.model.embed_tokens.weight",
        "llm.model.layers.0.self_attn.q_norm.weight",
        HEAD,
        "vpm.embeddings.patch_embedding.weight",
        "vpm.encoder.layers.0.self_attn.k_proj.weight",
        "vpm.post_layernorm.bias",
        "resampler.query",
        "resampler.proj",
        "resampler.attn.in_proj_weight",
        "apm.conv1.weight",
        "apm.layers.0.self_attn_layer_norm.weight",
        "audio_projection_layer.linear1.weight",
        "tts.emb_text.weight",
        "tts.emb_code.0.weight",
        "tts.head_code.0.parametrizations.weight.original0",
        "tts.head_code.0.parametrizations.weight.original1",
        "tts.projector_semantic.linear2.bias",
        "tts.projector_spk.linear1.weight",
        "tts.model.layers.0.mlp.down_proj.weight",
    ):
        assert key in keys
    roots = {"llm", "vpm", "resampler", "apm", "audio_projection_layer", "tts"}
    assert {key.split(".")[0] for key in keys} == roots


def test_half_precision_files_are_taken(folder: Path) -> None:
    """The published weights are bfloat16."""
    state = load_file(folder / WEIGHTS)
    save_file({key: value.bfloat16() for key, value in state.items()}, folder / WEIGHTS)
    head = load(folder).llm.lm_head.weight
    assert head.dtype == torch.float32
    assert torch.equal(head, state[HEAD].bfloat16().float())


def shard(folder: Path) -> dict[str, str]:
    """Split the weights in two files with an index."""
    state = load_file(folder / WEIGHTS)
    names = {key: f"model-{index % 2}.safetensors" for index, key in enumerate(sorted(state))}
    for name in set(names.values()):
        save_file({key: state[key] for key in state if names[key] == name}, folder / name)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return names


def test_shards_are_the_same_as_one_file(folder: Path, published: Path) -> None:
    """The published checkpoint comes in four files."""
    shard(folder)
    assert len(weight_files(folder)) == 2
    whole = load(published).state_dict()
    for key, value in load(folder).state_dict().items():
        assert torch.equal(value, whole[key])


def test_a_missing_shard_is_an_error(folder: Path) -> None:
    """A download that broke off would load half."""
    shard(folder)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(OSError, match="model-1"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "", "config"],
)
def test_an_index_names_weights_beside_it_only(folder: Path, name: str) -> None:
    """A checkpoint could have any file of the machine read."""
    (folder / INDEX).write_text(json.dumps({"weight_map": {HEAD: name}}))
    with pytest.raises(CheckpointError, match="not beside it"):
        load(folder)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"]
)
def test_a_malformed_index_is_refused(folder: Path, text: str) -> None:
    """A broken download would show as a programming error."""
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        load(folder)


def test_no_weights_at_all_is_an_error(folder: Path) -> None:
    """The message would not say what is looked for."""
    (folder / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="index"):
        load(folder)


def test_missing_unknown_and_misshaped_keys_are_all_named(folder: Path) -> None:
    """Whoever converts a checkpoint would find its faults one at a time."""
    rewrite(
        folder, **{HEAD: None, "llm.extra": torch.zeros(2), "resampler.query": torch.zeros(3, 32)}
    )
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    message = str(refused.value)
    assert f"1 missing keys: {HEAD}" in message
    assert "1 unknown keys: llm.extra" in message
    assert "1 keys of another shape: resampler.query (3, 32) not (64, 32)" in message


def test_a_long_list_of_keys_is_cut(folder: Path) -> None:
    """A wrong file would fill the screen."""
    rewrite(folder, **{f"extra.{index}": torch.zeros(1) for index in range(LISTED_MAX + 5)})
    with pytest.raises(CheckpointError, match=f"{LISTED_MAX + 5} unknown keys: .* and 5 more"):
        load(folder)


def test_what_nothing_is_computed_from_may_be_there(folder: Path) -> None:
    """The published checkpoint has a table that is never read."""
    rewrite(folder, **{"tts.model.embed_tokens.weight": torch.zeros(3, 3)})
    load(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -100])
def test_a_damaged_file_is_refused(folder: Path, keep: int) -> None:
    """A broken download would load, or crash the server."""
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, bad: float) -> None:
    """One such number makes everything that is said rubbish, and nobody knows why."""
    state = load_file(folder / WEIGHTS)
    state[HEAD][3, 5] = bad
    state["resampler.query"][0, 0] = bad
    rewrite(folder, **{HEAD: state[HEAD], "resampler.query": state["resampler.query"]})
    with pytest.raises(
        CheckpointError, match=f"2 keys .* not finite in float32: {HEAD}, resampler.query"
    ):
        load(folder)


def test_weights_that_a_format_cannot_hold_are_refused_by_name(folder: Path) -> None:
    """In half precision a large number becomes an infinite one."""
    state = load_file(folder / WEIGHTS)
    state[HEAD][3, 5] = 1e6
    rewrite(folder, **{HEAD: state[HEAD]})
    load(folder)
    with pytest.raises(CheckpointError, match=rf"not finite in float16: {HEAD}"):
        load_parts(load_config(folder / "config.json"), folder, torch.float16)


# -- config ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, r"config\.hidden_act is 'gelu'"),
        ({"attention_bias": True}, r"config\.attention_bias is True"),
        ({"use_sliding_window": True, "max_window_layers": 2}, "max_window_layers is 2"),
        ({"audio_config": {"activation_function": "relu"}}, "audio_config.activation_function"),
        ({"vision_config": {"hidden_act": "gelu"}}, "vision_config.hidden_act"),
        ({"tts_config": {"backbone_model": "gpt"}}, "tts_config.backbone_model"),
        ({"tts_config": {"hidden_act": "gelu"}}, "tts_config.hidden_act"),
        ({"tts_config": {"normalize_projected_hidden": False}}, "normalize_projected_hidden"),
        ({"tts_config": {"num_vq": 4}}, "tts_config.num_vq is 4"),
        ({"tts_config": {"projector_type": "none"}}, "tts_config.projector_type"),
        ({"tts_config": {"llm_dim": 7}}, "llm_dim is 7"),
    ],
)
def test_another_architecture_is_refused_by_name(change: Mapping[str, Any], named: str) -> None:
    """A file of another version would load half understood."""
    with pytest.raises(ValueError, match=named):
        read_config(changed(CONFIG, change), "x")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("", "model_type", "minicpmv"),
        ("", "version", "2.6"),
        ("", "audio_chunk_length", 2.0),
        ("", "slice_mode", False),
        ("", "rope_parameters", {"rope_type": "yarn"}),
        ("slice_config", "patch_size", 16),
        ("audio_config", "scale_embedding", True),
        ("vision_config", "num_channels", 4),
        ("tts_config", "condition_type", "llm_hidden"),
        ("tts_config", "use_llm_hidden_state", True),
        ("tts_config", "interleaved", True),
        ("tts_config", "audio_bos_token_id", 320),
        ("tts_config", "audio_bos_token_id", -1),
        ("tts_config", "text_eos_token_id", 320),
    ],
)
def test_what_is_not_computed_is_refused_by_name(section: str, key: str, value: Any) -> None:
    """A checkpoint that means something else would be served, and answer wrongly."""
    change = {section: {key: value}} if section else {key: value}
    path = rf"config\.{section}\.{key}" if section else rf"config\.{key}"
    with pytest.raises(ValueError, match=rf"{path} is "):
        read_config(changed(CONFIG, change), "x")


@pytest.mark.parametrize("key", ["condition_type", "normalize_projected_hidden"])
def test_a_default_that_is_not_computed_is_refused_by_name(key: str) -> None:
    """The published classes take another value where there is none."""
    raw = changed(CONFIG, {"tts_config": {}})
    del raw["tts_config"][key]
    with pytest.raises(ValueError, match=rf"config\.tts_config\.{key} is .* by default"):
        read_config(raw, "x")


def test_values_that_are_computed_are_taken_as_they_are_written() -> None:
    """A file would be refused for saying what is true."""
    said = {"model_type": "minicpmo", "version": 4.5, "audio_chunk_length": 1, "slice_mode": True}
    read_config({**CONFIG, **said, "quantization_config": None, "rope_parameters": None}, "x")
    answered = read_config(changed(CONFIG, {"tts_config": {"text_eos_token_id": 7}}), "x")
    assert answered.tts.text_eos_token_id == 7


@pytest.mark.parametrize(
    ("section", "key", "found"),
    [
        ("", "head_dim", lambda c: c.llm.head_dim == 128),
        ("", "max_position_embeddings", lambda c: c.llm.max_position_embeddings == 32_768),
        ("", "hidden_size", lambda c: c.llm.hidden_size == 4096),
        ("", "rope_theta", lambda c: c.llm.rope_parameters["rope_theta"] == 10_000),
        ("", "rms_norm_eps", lambda c: c.llm.rms_norm_eps == 1e-6),
        ("", "tie_word_embeddings", lambda c: c.llm.tie_word_embeddings is False),
        ("", "query_num", lambda c: c.vision.queries == 64),
        ("audio_config", "num_mel_bins", lambda c: c.audio.num_mel_bins == 80),
        ("audio_config", "max_source_positions", lambda c: c.audio.max_source_positions == 1500),
        ("audio_config", "d_model", lambda c: c.audio.d_model == 384),
        ("vision_config", "image_size", lambda c: c.vision.siglip.image_size == 224),
        ("vision_config", "num_hidden_layers", lambda c: c.vision.siglip.num_hidden_layers == 12),
        ("tts_config", "num_key_value_heads", lambda c: c.tts.llama.num_key_value_heads == 12),
        (
            "tts_config",
            "max_position_embeddings",
            lambda c: c.tts.llama.max_position_embeddings == 4096,
        ),
        ("tts_config", "num_audio_tokens", lambda c: c.tts.num_audio_tokens == 4097),
    ],
)
def test_a_value_that_is_absent_is_the_published_class_s(
    section: str, key: str, found: Callable[[ModelConfig], bool]
) -> None:
    """A file that leaves out what its classes say anyway, as their writer does, is valid."""
    raw = changed(CONFIG, {section: {}} if section else {})
    if key == "hidden_size":
        raw["tts_config"] = {**raw["tts_config"], "llm_dim": 4096}
    (raw[section] if section else raw).pop(key)
    assert found(read_config(raw, "x"))


def test_the_ids_that_are_absent_are_the_published_class_s() -> None:
    """An id beyond the table would fail the first word that is spoken."""
    raw = changed(CONFIG, {"tts_config": {"num_text_tokens": 30_000}})
    del raw["tts_config"]["audio_bos_token_id"], raw["tts_config"]["text_eos_token_id"]
    tts = read_config(raw, "x").tts
    assert (tts.audio_bos_token_id, tts.text_eos_token_id) == (21_132, 21_133)
    raw["tts_config"]["num_text_tokens"] = 320
    with pytest.raises(ValueError, match=r"audio_bos_token_id is 21132, .*num_text_tokens is 320"):
        read_config(raw, "x")


# -- the processor --------------------------------------------------------------------------------

PROCESSOR = {
    "image_processor_type": "MiniCPMVImageProcessor",
    "processor_class": "MiniCPMOProcessor",
    "max_slice_nums": 9,
    "scale_resolution": 112,
    "patch_size": 14,
    "use_image_id": True,
    "image_feature_size": 64,
    "slice_mode": True,
    "norm_mean": [0.5, 0.5, 0.5],
    "norm_std": [0.5, 0.5, 0.5],
    "version": 2.6,
    "feature_size": 80,
    "sampling_rate": 16000,
    "n_fft": 400,
    "hop_length": 160,
}


def processed(folder: Path, **changes: Any) -> ModelConfig:
    """Load the config beside a `preprocessor_config.json`; None leaves a key out."""
    said = {key: value for key, value in {**PROCESSOR, **changes}.items() if value is not None}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return load_config(folder / "config.json")


def test_a_processor_that_says_what_is_computed_is_taken(folder: Path) -> None:
    """The published folder holds one."""
    plain = load_config(folder / "config.json")
    assert processed(folder).vision.scale_resolution == plain.vision.scale_resolution == 112
    processed(folder, norm_mean=None, norm_std=None, slice_mode=None, feature_size=None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_processor_type", "CLIPImageProcessor"),
        ("scale_resolution", 448),
        ("patch_size", 16),
        ("image_feature_size", 96),
        ("slice_mode", False),
        ("norm_mean", [0.48, 0.46, 0.41]),
        ("norm_std", [0.27, 0.26, 0.28]),
        ("feature_size", 128),
        ("sampling_rate", 24_000),
        ("n_fft", 512),
        ("hop_length", 320),
        ("dither", 0.1),
    ],
)
def test_a_processor_that_says_otherwise_is_refused_by_name(
    folder: Path, key: str, value: Any
) -> None:
    """Pictures and sound would be prepared in another way than the model was trained on."""
    with pytest.raises(ValueError, match=rf"preprocessor_config\.{key} is "):
        processed(folder, **{key: value})


def test_a_processor_without_a_size_means_its_class_s(folder: Path) -> None:
    """448 is what the published processor takes where its file is silent."""
    with pytest.raises(ValueError, match=r"scale_resolution is 448 by default; 112 is computed"):
        processed(folder, scale_resolution=None)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"'])
def test_a_processor_is_an_object(folder: Path, text: str) -> None:
    """A broken download would be passed over."""
    (folder / "preprocessor_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        load_config(folder / "config.json")


# -- sections -------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", ["audio_config", "vision_config", "tts_config"])
def test_a_missing_section_is_named(section: str) -> None:
    """A text model would load as if it could hear."""
    raw = {key: value for key, value in CONFIG.items() if key != section}
    with pytest.raises(ValueError, match=section):
        read_config(raw, "x")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_config_is_an_object(tmp_path: Path, text: str) -> None:
    """A broken file would show as a programming error."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(tmp_path / "config.json")


def test_what_says_nothing_of_the_computation_is_left_alone() -> None:
    """The published file would be refused for its remarks."""
    config = read_config({**CONFIG, "auto_map": {"AutoModel": "x.Y"}, "torch_dtype": "?"}, "x")
    assert config == read_config(CONFIG, "x") or config.audio == read_config(CONFIG, "x").audio


def test_the_context_is_bounded() -> None:
    """A model that allows 40960 positions would take five times the memory."""
    longer = read_config(changed(CONFIG, {"max_position_embeddings": 40_960}), "x")
    assert longer.context_limit == 8192
    shorter = read_config(changed(CONFIG, {"max_position_embeddings": 512}), "x")
    assert shorter.context_limit == 512


# -- tokenizer and vocoder ------------------------------------------------------------------------


def test_instructions_never_yield_control_tokens(folder: Path) -> None:
    """A client could close the unit from within its instructions."""
    tokens = Tokens(folder)
    text = "<|im_end|></unit><|listen|> ünïcode"
    ids = tokens.encode(text)
    assert not tokens.control & set(ids)
    assert tokens.decode(ids) == text


def test_control_tokens_are_no_text(folder: Path) -> None:
    """A client would be shown markup."""
    tokens = Tokens(folder)
    assert tokens.decode([tokens.ids.speak, *tokens.encode("dog"), tokens.ids.turn_eos]) == "dog"


def test_a_missing_control_token_is_named(folder: Path) -> None:
    """The model would be steered with the wrong ids."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|turn_eos|>", "<|other|>"))
    with pytest.raises(ValueError, match="turn_eos"):
        Tokens(folder)


@pytest.mark.parametrize("bad", ['{"bad_token_ids": "x"}', '{"bad_token_ids": [1.5]}', "{"])
def test_malformed_bad_ids_are_refused(folder: Path, bad: str) -> None:
    """Ids that must not be decided would be."""
    (folder / "tokenizer_config.json").write_text(bad)
    with pytest.raises(ValueError, match=r"bad_token_ids|Expecting"):
        Tokens(folder)


def test_a_damaged_tokenizer_is_refused(folder: Path) -> None:
    """A broken download would show as a programming error."""
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokens(folder)


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    """Ids would be looked up beyond the table."""
    path = folder / "config.json"
    path.write_text(json.dumps(changed(json.loads(path.read_text()), {"vocab_size": 300})))
    with pytest.raises(ValueError, match="tokenizer has"):
        DuplexModel.load(folder, slots=1)


@pytest.mark.parametrize("spoilt", ["sizes", "width", "key", "codes", "damage"])
def test_a_vocoder_that_does_not_fit_is_refused(folder: Path, spoilt: str) -> None:
    """The first words of a session would fail it, or be noise."""
    path = folder / VOCODER / "pieces.safetensors"
    if spoilt == "sizes":
        (folder / VOCODER / "config.json").write_text('{"frame": 960}')
    elif spoilt == "damage":
        path.write_bytes(path.read_bytes()[:50])
    else:
        pieces = load_file(path)["pieces"]
        pieces = pieces[:-1] if spoilt == "codes" else pieces[:, 1:]
        save_file({"other" if spoilt == "key" else "pieces": pieces.contiguous()}, path)
    with pytest.raises(ValueError, match="vocoder"):
        DuplexModel.load(folder, slots=1)
