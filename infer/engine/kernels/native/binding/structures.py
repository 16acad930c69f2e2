"""The structures of c/model.h for ctypes, with the same fields in the same order, and its constants."""

from ctypes import Structure, c_float, c_int32, c_int64, c_uint8, c_uint32, c_void_p
from enum import IntEnum
from typing import Final

PANEL: Final = 16
BLOCK_ROWS: Final = 16
BLOCK_COLUMNS: Final = 32
MAX_RANKS: Final = 64
MOST_ROWS: Final = 12  # or fewer, by instruction set
ATTENTION_ROWS: Final = 32
KEY_TILE: Final = 256
KEY_SPLIT: Final = 1024
SHARED_ITEMS: Final = 8
GROUP: Final = 32
EXPERT_TOKENS: Final = 64
MAX_GROUPS: Final = 64
MAX_PAIRS: Final = 3


# How values are stored, `enum format`; the kinds of operations, `enum kind`; the buffers of rows, `enum buffer`.
Format = IntEnum("Format", "FP32 BF16 FP16 FP8 INT8 INT4 CODES8 CODES4 PAIRS8 PAIRS4", start=0)
OperationKind = IntEnum("OperationKind", "EMBED NORM MULTIPLY APPEND ATTEND GATE ROUTE EXPERTS REDUCE HEAD", start=0)
Buffer = IntEnum("Buffer", "HIDDEN NORMED QKV QUERY ATTENDED INNER GATED PARTIAL SCORES LOGITS", start=0)


class PackedMatrix(Structure):
    """`struct matrix`."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("panel_bytes", c_int64),
        ("format", c_int32),
        ("slices", c_int32),
        ("group", c_int32),
    )


class PackedUpFactor(Structure):
    """`struct up_factor`."""

    _fields_ = (
        ("matrix", PackedMatrix),
        ("panel", c_int32),
        ("rank", c_int32),
    )


class PackedAdapter(Structure):
    """`struct adapter`."""

    _fields_ = (
        ("down", PackedMatrix),
        ("scales", c_void_p),
        ("ups", PackedUpFactor * MAX_PAIRS),
        ("pairs", c_int32),
        ("bias", c_void_p),
    )


class NormVectors(Structure):
    """`struct vectors`."""

    _fields_ = (
        ("weight", c_void_p),
        ("offset", c_void_p),
    )


class PreparedOperation(Structure):
    """`struct operation`."""

    _fields_ = (
        ("kind", c_int32),
        ("source", c_int32),
        ("target", c_int32),
        ("layer", c_int32),
        ("window", c_int32),
        ("variant", c_int32),
        ("wanted", c_int32),
        ("add", c_int32),
        ("top_k", c_int32),
        ("normalize", c_int32),
        ("experts", c_int32),
        ("groups", c_int32),
        ("top_groups", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("rows", c_int64),
        ("weight", c_void_p),
        ("offset", c_void_p),
        ("table", c_void_p),
        ("positions", c_void_p),
        ("factors", c_void_p),
        ("matrix", PackedMatrix),
        ("second", PackedMatrix),
        ("adapters", c_void_p),
        ("second_adapters", c_void_p),
        ("vectors", c_void_p),
        ("heads", c_void_p),
    )


class StepArrays(Structure):
    """`struct step`."""

    _fields_ = (
        ("tokens", c_int32),
        ("spans", c_int32),
        ("wanted", c_int32),
        ("begun", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("span", c_void_p),
        ("tables", c_void_p),
        ("rows", c_void_p),
        ("begun_blocks", c_void_p),
        ("adapted", c_void_p),
        ("num_adapted", c_int64),
        ("adapter_of", c_void_p),
        ("table_blocks", c_int64),
    )


class RowOption(Structure):
    """`struct row_option`."""

    _fields_ = (
        ("column", c_void_p),
        ("rows", c_void_p),
        ("spans", c_void_p),
        ("bytes", c_int64),
    )


class EngineChannel(Structure):
    """`struct channel`."""

    _fields_ = (
        ("descriptor", c_int32),
        ("answers", c_int32),
        ("next_step", c_uint8 * 20),
        ("tokens", c_uint8 * 16),
        ("again", c_uint8 * 12),
        ("result", c_void_p),
        ("sampled", c_void_p),
        ("finite", c_void_p),
        ("candidates", c_void_p),
        ("numbers", c_void_p),
        ("mask", c_void_p),
        ("masks", c_void_p),
        ("mask_stride", c_void_p),
        ("num_candidates", c_int32),
        ("has_next", c_int32),
        ("frame", c_void_p),
        ("frame_bytes", c_int64),
        ("added", c_void_p),
        ("most_added", c_int32),
        ("num_added", c_int32),
        ("waits", c_int32),
        ("capacity", c_int32),
        ("has_left", c_int32),
        ("num_options", c_int32),
        ("options", c_void_p),
        ("given", c_void_p * 5),
    )


class RankLink(Structure):
    """`struct link`."""

    _fields_ = (
        ("arrived", c_void_p),
        ("slots", c_void_p),
        ("slot_floats", c_int64),
        ("sequence", c_uint32),
    )


class Sampling(Structure):
    """`struct sampling`."""

    _fields_ = (
        ("rows", c_void_p),
        ("batch", c_void_p),
        ("scratch", c_void_p),
        ("scratch_bytes", c_int64),
        ("next", c_int32),
        ("again", c_int32),
    )


class NativeModel(Structure):
    """`struct model`."""

    _fields_ = (
        ("operations", c_void_p),
        ("num_operations", c_int64),
        ("tp", c_int32),
        ("rank", c_int32),
        ("threads", c_int32),
        ("num_layers", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotated", c_int32),
        ("block_size", c_int32),
        ("key_format", c_int32),
        ("value_format", c_int32),
        ("weight_format", c_int32),
        ("hadamard", c_int32),
        ("attention_scaling", c_float),
        ("hidden_size", c_int64),
        ("frequencies", c_void_p),
        ("cache", c_void_p),
        ("layer_bytes", c_int64),
        ("page_bytes", c_int64 * 2),
        ("scale_offset", c_int64 * 2),
        ("twins", c_void_p),
        ("twin_layer_bytes", c_int64),
        ("twin_page_bytes", c_int64),
        ("twin_scale_offset", c_int64),
        ("twin_of", c_void_p),
        ("buffers", c_void_p * len(Buffer)),
        ("strides", c_int64 * len(Buffer)),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("scratch", c_void_p),
        ("scratch_floats", c_int64),
        ("parts", c_void_p),
        ("parts_done", c_void_p),
        ("chosen", c_void_p),
        ("chosen_weights", c_void_p),
        ("pairs", c_void_p),
        ("expert_inner", c_void_p),
        ("expert_gated", c_void_p),
        ("expert_out", c_void_p),
        ("expert_inner_stride", c_int64),
        ("expert_gated_stride", c_int64),
        ("link", RankLink),
        ("sampling", c_void_p),
        ("pool", c_void_p),
        ("step", StepArrays),
        ("rounded", c_void_p),
        ("rounded_values", c_int64),
        ("head_first", c_int32),
        ("head_count", c_int32),
        ("counter", c_int32),
        ("low", c_void_p),
        ("low_stride", c_int64),
        ("channel", c_void_p),
    )
