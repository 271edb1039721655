"""What mixes the tokens of a layer in the place of attention, or beside it: its parameters, what it
keeps of a sequence, and what it keeps alive while it runs.

Owns the sizes of each mechanism, as transformers builds it: the gated delta rule
(arXiv:2412.06464), Mamba 1 (arXiv:2312.00752) and 2 (arXiv:2405.21060), short convolutions,
lightning attention (arXiv:2401.04658). ``families/with_states.py`` says whose they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fairlead_runtime.sizing.config_json import ConfigReader, ShapeError
from fairlead_runtime.sizing.states import StatePart

CHUNK = 64  # tokens of a chunk of the gated delta rule, in transformers' code


@dataclass(frozen=True, slots=True)
class Mixer:
    """Rows and columns of the matrices that it multiplies by (``products``), and all other
    parameters (``rest``); ``alive``: elements in float32 that it keeps of each token, measured at
    most;
    ``chunk``: a row's tokens are filled up to a multiple of it; ``wide``: of ``rest``, those that
    its class makes in float32, whatever the model's type; ``reads_weights``: its code reads those
    of its linear layers itself.
    """

    products: tuple[tuple[int, int], ...]
    rest: int
    alive: int
    state: tuple[StatePart, ...]
    chunk: int = 1
    buffers: int = 0  # numbers beside the parameters, of the model's type
    wide: int = 0
    reads_weights: bool = False

    @property
    def matrices(self) -> int:
        """Parameters in its matrices."""
        return sum(rows * columns for rows, columns in self.products)

    @property
    def channels(self) -> int:
        """Output rows of its matrices."""
        return sum(rows for rows, _ in self.products)


def gated_delta(s: ConfigReader) -> Mixer:
    """Of Qwen3.5, which makes queries, keys and values in one product. Sizes that a configuration
    leaves out are those of OLMo Hybrid.
    """
    hidden = s.integer("hidden_size")
    keys = s.optional("linear_num_key_heads") or s.heads
    values = s.optional("linear_num_value_heads") or s.heads
    key_dim = s.optional("linear_key_head_dim") or 3 * hidden // (4 * keys)
    value_dim = s.optional("linear_value_head_dim") or 2 * key_dim
    if values % keys:
        problem = f"{values} heads of values cannot share {keys} of keys evenly"
        raise ShapeError("linear_num_value_heads", problem)
    key, value = keys * key_dim, values * value_dim
    mixed, kernel = 2 * key + value, s.integer("linear_conv_kernel_dim")
    # Queries, keys and values of all heads, scaled and decayed, and the products within a chunk.
    chunked = values * (6 * key_dim + 5 * value_dim + 5 * CHUNK)
    return Mixer(
        # Queries, keys and values; their gate, decay and strength.
        products=(*((rows, hidden) for rows in (mixed, value, values, values)), (hidden, value)),
        rest=mixed * kernel + 2 * values + value_dim,
        alive=3 * mixed + 2 * value + chunked,
        state=(
            StatePart("conv", (mixed, kernel - 1), ""),
            StatePart("recurrent", (values, key_dim, value_dim)),
        ),
        chunk=CHUNK,
    )


def olmo_gated_delta(s: ConfigReader) -> Mixer:
    """Of OLMo Hybrid, which makes queries, keys and values apart, and whose decays are float32."""
    mixer = gated_delta(s)
    (mixed, hidden), *rest = mixer.products
    value, _ = rest[0]
    key = (mixed - value) // 2
    products = ((key, hidden), (key, hidden), (value, hidden), *rest)
    return replace(mixer, products=products, wide=s.optional("linear_num_value_heads") or s.heads)


def joined_gated_delta(s: ConfigReader) -> Mixer:
    """Of Qwen3-Next, which makes their gate in the same product, and both of the other two."""
    mixer = gated_delta(s)
    (mixed, hidden), (gate, _), (decay, _), (strength, _), out = mixer.products
    products = ((mixed + gate, hidden), (decay + strength, hidden), out)
    return replace(mixer, products=products)


# Names of the settings of Mamba 2 in its own family; others have their own for them.
_MAMBA2 = {
    "heads": "num_heads",
    "dim": "head_dim",
    "groups": "n_groups",
    "state": "state_size",
    "kernel": "conv_kernel",
    "expand": "expand",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
    "out_bias": "use_bias",
    "chunk": "chunk_size",
}
_PREFIXED = {
    "heads": "mamba_n_heads",
    "dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
    "out_bias": "mamba_proj_bias",
    "chunk": "mamba_chunk_size",
}
_NEMOTRON = _MAMBA2 | {
    "heads": "mamba_num_heads",
    "dim": "mamba_head_dim",
    "state": "ssm_state_size",
    "expand": "",
}


def mamba2(s: ConfigReader) -> Mixer:
    return _mamba2(s, _MAMBA2)


def prefixed_mamba2(s: ConfigReader) -> Mixer:
    """Of Bamba and Granite 4."""
    return _mamba2(s, _PREFIXED)


def nemotron_mamba2(s: ConfigReader) -> Mixer:
    return _mamba2(s, _NEMOTRON)


def falcon_mamba2(s: ConfigReader) -> Mixer:
    """Of Falcon-H1: its width is a setting of its own, and its norm is optional."""
    inner = s.optional("mamba_d_ssm")
    names = _PREFIXED | {"out_bias": "projectors_bias"}
    mixer = _mamba2(s, names, inner=inner, normed=s.flag("mamba_rms_norm"))
    (rows, _), _ = mixer.products
    return replace(mixer, buffers=rows)  # a factor for each


def _mamba2(
    s: ConfigReader, names: Mapping[str, str], *, inner: int | None = None, normed: bool = True
) -> Mixer:
    hidden, heads = s.integer("hidden_size"), s.integer(names["heads"])
    if not inner and names["expand"]:
        inner = s.integer(names["expand"]) * hidden
    automatic = s.get(names["dim"]) == "auto"
    dim = (inner or 0) // heads if automatic else s.integer(names["dim"])
    inner = inner or heads * dim
    if dim * heads != inner:
        problem = f"{heads} heads of {dim} are not the {inner} elements of the mixer"
        raise ShapeError(names["dim"], problem)
    groups, state, kernel = (s.integer(names[key]) for key in ("groups", "state", "kernel"))
    if heads % groups:
        raise ShapeError(names["heads"], f"{heads} heads cannot share {groups} groups evenly")
    mixed = inner + 2 * groups * state
    made = inner + mixed + heads
    biases = mixed * s.flag(names["conv_bias"])
    biases += made * s.flag(names["bias"]) + hidden * s.flag(names["out_bias"])
    chunk = s.integer(names["chunk"])
    # The keys and queries of all heads, what each gives the state, and the products within a chunk
    # of queries and keys, with their decays.
    chunked = heads * (4 * state + 4 * dim + 4 * chunk) + 2 * heads * dim * state // chunk
    return Mixer(
        products=((made, hidden), (hidden, inner)),
        rest=mixed * kernel + 3 * heads + inner * normed + biases,
        alive=2 * made + mixed + 2 * inner + chunked,
        state=(
            StatePart("conv", (mixed, kernel - 1), ""),
            StatePart("recurrent", (heads, dim, state)),
        ),
        chunk=chunk,
    )


def falcon_mamba1(s: ConfigReader) -> Mixer:
    """Of Falcon-Mamba, whose files may give its width beside a factor that is not its own."""
    names = ("state_size", "conv_kernel", "expand", "time_step_rank", "use_conv_bias", "use_bias")
    return _mamba1(s, *names, inner=s.optional("intermediate_size"), normed=False)


def jamba_mamba1(s: ConfigReader) -> Mixer:
    names = ("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank")
    return _mamba1(s, *names, "mamba_conv_bias", "mamba_proj_bias", normed=True)


def _mamba1(
    s: ConfigReader,
    state_setting: str,
    kernel_setting: str,
    expand: str,
    rank_setting: str,
    conv_bias: str,
    bias: str,
    *,
    inner: int | None = None,
    normed: bool,
) -> Mixer:
    hidden, state, kernel = (s.integer(k) for k in ("hidden_size", state_setting, kernel_setting))
    inner = inner or s.integer(expand) * hidden
    rank = -(-hidden // 16) if s.get(rank_setting) == "auto" else s.integer(rank_setting)
    biases = inner * s.flag(conv_bias) + (2 * inner + hidden) * s.flag(bias)
    return Mixer(
        products=(
            *((2 * inner, hidden), (rank + 2 * state, inner)),
            *((inner, rank), (hidden, inner)),
        ),
        # The kernel of the convolution, the bias of the time step, decays and what passes by.
        rest=inner * kernel + inner + inner * state + inner + (rank + 2 * state) * normed + biases,
        alive=6 * inner + 7 * inner * state // 2,
        state=(
            StatePart("conv", (inner, kernel - 1), ""),
            StatePart("recurrent", (inner, state)),
        ),
        # Without weights norms of the time step and of the state's two sides keep some of no use.
        buffers=0 if normed else inner + 2 * state,
        reads_weights=True,
    )


def short_convolution(s: ConfigReader) -> Mixer:
    """Of LFM2 and LFM3."""
    hidden, kernel, bias = s.integer("hidden_size"), s.integer("conv_L_cache"), s.flag("conv_bias")
    return Mixer(
        products=((3 * hidden, hidden), (hidden, hidden)),
        rest=hidden * kernel + 5 * hidden * bias,
        alive=8 * hidden,
        state=(StatePart("conv", (hidden, kernel - 1), ""),),
    )


def lightning(s: ConfigReader) -> Mixer:
    """Of MiniMax, whose state has the type of its model."""
    hidden, heads, dim = s.integer("hidden_size"), s.heads, s.head_dim
    inner, block = heads * dim, s.integer("block_size")
    return Mixer(
        products=((3 * inner, hidden), (inner, hidden), (hidden, inner)),
        rest=inner,
        alive=9 * inner + 2 * heads * block,
        state=(StatePart("recurrent", (heads, dim, dim), ""),),
        # The decay of each head, from its chunk's start, to its end, and between its tokens.
        buffers=heads * (1 + block) ** 2,
    )


MIXERS: Mapping[str, Callable[[ConfigReader], Mixer]] = {
    "gated_delta": gated_delta,
    "joined_gated_delta": joined_gated_delta,
    "olmo_gated_delta": olmo_gated_delta,
    "mamba2": mamba2,
    "prefixed_mamba2": prefixed_mamba2,
    "nemotron_mamba2": nemotron_mamba2,
    "falcon_mamba2": falcon_mamba2,
    "falcon_mamba1": falcon_mamba1,
    "jamba_mamba1": jamba_mamba1,
    "short_convolution": short_convolution,
    "lightning": lightning,
}
