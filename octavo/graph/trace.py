"""The op vocabulary: each method of `Trace` is one op, checks its operands and records a node."""

from __future__ import annotations

from octavo.graph.graph import Attr, DType, Graph, Node, Op, Rows, Value, Weight, group_layers


class Trace:
    """Records the ops that a model's build function calls, in order.

    Activations are 2-D, [rows, width]. A layer is named by its prefix: `linear(x, "layers.0.attn.q", 576)` reads the
    weight `layers.0.attn.q.weight`. Matrices and biases are seen at the activation dtype, norm weights in float32;
    every op computes in at least float32 inside and rounds its output once.

    The residual stream, which `embed` begins and `add` continues, is float32 whatever the activation dtype: what each
    layer adds is small beside it, and bfloat16 would lose the most of its own error there. A norm brings it back to the
    activation dtype, and no other op takes it.

    Every method raises ValueError when its operands do not fit together: that is a mistake in the model's code.

    Args:
        dtype: of the activations: "float32" or "bfloat16".
    """

    def __init__(self, dtype: DType) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"activation dtype {dtype!r}: expected float32 or bfloat16")
        self.dtype: DType = dtype
        self.token_ids = Value("token_ids", "int32", "T", None)
        self.positions = Value("positions", "int32", "T", None)
        self._values = {value.name: value for value in (self.token_ids, self.positions)}
        self._weights: dict[str, Weight] = {}
        self._nodes: list[Node] = []

    def graph(self, output: Value) -> Graph:
        """The graph of everything recorded so far."""
        self._check_known(output)
        return Graph((self.token_ids, self.positions), tuple(self._nodes), output, group_layers(self._nodes))

    # Tokens in, logits out

    def embed(self, ids: Value, name: str, vocab_size: int, width: int, *, scale: float = 1.0) -> Value:
        """The residual stream's beginning: rows of `{name}.weight` [vocab_size, width], times `scale`.

        `scale` is first rounded to the activation dtype, as Gemma was trained. A worker that has only some rows of the
        weight gives zeros for the others' (attr `first`: the id of its first row).
        """
        _check(ids.dtype == "int32" and ids.width is None, f"embed: {ids} is not one token id per row")
        weight = self._weight(f"{name}.weight", self.dtype, vocab_size, width)
        return self._record("embed", (ids,), (weight,), {"scale": scale, "first": 0}, width=width, dtype="float32")

    def select_rows(self, x: Value) -> Value:
        """The rows whose logits are needed: [T, width] -> [S, width]."""
        _check(x.rows == "T", f"select_rows: {x} has been selected from already")
        return self._record("select_rows", (x,), (), {}, width=x.width, rows="S", dtype=x.dtype)

    def lm_head(self, x: Value, name: str, vocab_size: int) -> Value:
        """Logits in float32, not rounded in between: x @ `{name}.weight`.T; weight [vocab_size, width]."""
        self._check_activations("lm_head", x)
        weight = self._weight(f"{name}.weight", self.dtype, vocab_size, _width(x))
        return self._record("lm_head", (x,), (weight,), {}, width=vocab_size, dtype="float32")

    # Element by element, row by row

    def linear(self, x: Value, name: str, width: int, *, bias: bool = False) -> Value:
        """x @ `{name}.weight`.T + `{name}.bias`; weight [width, width of x], bias [width].

        Where a worker has only some columns of x and of the weight, its result is a partial sum, in float32.
        """
        self._check_activations("linear", x)
        weights = [self._weight(f"{name}.weight", self.dtype, width, _width(x))]
        if bias:
            weights.append(self._weight(f"{name}.bias", self.dtype, width))
        return self._record("linear", (x,), tuple(weights), {}, width=width)

    def rms_norm(self, x: Value, name: str, *, eps: float, head_dim: int | None = None) -> Value:
        """x / sqrt(mean(x²) + eps) * `{name}.weight`; with `head_dim`, each run of so many columns on its own."""
        size = _width(x) if head_dim is None else head_dim
        _check(_width(x) % size == 0, f"rms_norm: the width of {x} is not a multiple of {size}")
        weight = self._weight(f"{name}.weight", "float32", size)
        return self._record("rms_norm", (x,), (weight,), {"eps": eps}, width=x.width)

    def layer_norm(self, x: Value, name: str, *, eps: float) -> Value:
        """(x - mean) / sqrt(variance + eps) * `{name}.weight` + `{name}.bias`."""
        weights = tuple(self._weight(f"{name}.{part}", "float32", _width(x)) for part in ("weight", "bias"))
        return self._record("layer_norm", (x,), weights, {"eps": eps}, width=x.width)

    def add(self, stream: Value, x: Value) -> Value:
        """The residual stream, with x added to it."""
        _check(stream.dtype == "float32", f"add: {stream} is not the residual stream, which is float32")
        self._check_activations("add", x)
        _check((stream.rows, stream.width) == (x.rows, x.width), f"add: {stream} and {x} differ")
        return self._record("add", (stream, x), (), {}, width=x.width, dtype="float32")

    def silu_mul(self, gate: Value, up: Value) -> Value:
        """silu(gate) * up."""
        return self._gate("silu_mul", gate, up)

    def gelu_mul(self, gate: Value, up: Value) -> Value:
        """gelu(gate) * up, with the tanh approximation of GELU."""
        return self._gate("gelu_mul", gate, up)

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        _check(cap > 0, f"softcap: cap={cap} is not positive")
        return self._record("softcap", (x,), (), {"cap": cap}, width=x.width, dtype=x.dtype)

    def moe(
        self, x: Value, name: str, *, num_experts: int, width: int, top_k: int, norm_topk_prob: bool, activation: str
    ) -> Value:
        """A router picks `top_k` gated MLPs of inner `width` per row, weighted by its softmax.

        Weights, with E experts and H the width of x: `{name}.router.weight` [E, H], `{name}.gate.weight` and
        `{name}.up.weight` [E, width, H], `{name}.down.weight` [E, H, width].
        """
        _check(1 <= top_k <= num_experts, f"moe: top_k={top_k} of {num_experts} experts")
        _check(activation in ("silu", "gelu_tanh"), f"moe: unknown activation {activation!r}")
        self._check_activations("moe", x)
        hidden = _width(x)
        weights = (
            self._weight(f"{name}.router.weight", self.dtype, num_experts, hidden),
            self._weight(f"{name}.gate.weight", self.dtype, num_experts, width, hidden),
            self._weight(f"{name}.up.weight", self.dtype, num_experts, width, hidden),
            self._weight(f"{name}.down.weight", self.dtype, num_experts, hidden, width),
        )
        attrs: dict[str, Attr] = {"top_k": top_k, "norm_topk_prob": norm_topk_prob, "activation": activation}
        return self._record("moe", (x,), weights, attrs, width=hidden)

    # Attention

    def rope(self, x: Value, *, head_dim: int, inv_freq: tuple[float, ...], attention_factor: float = 1.0) -> Value:
        """Rotate each head by its token's position; column i is paired with column i + n, n = len(inv_freq).

        The angle is position * inv_freq[i] in float32; cos and sin are scaled by `attention_factor`. Columns from 2n
        on stay as they are.
        """
        self._check_activations("rope", x)
        _check(_width(x) % head_dim == 0, f"rope: the width of {x} is not a multiple of head_dim={head_dim}")
        _check(2 * len(inv_freq) <= head_dim, f"rope: {len(inv_freq)} frequencies are too many for head_dim={head_dim}")
        attrs: dict[str, Attr] = {"head_dim": head_dim, "inv_freq": inv_freq, "attention_factor": attention_factor}
        return self._record("rope", (x, self.positions), (), attrs, width=x.width)

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Value:
        """Store k and v in the cache of `layer`, then attend, causally, to everything that the sequence has there.

        q [T, num_heads * head_dim]; k, v [T, num_kv_heads * head_dim]; query head h reads KV head
        h // (num_heads // num_kv_heads). A query sees itself and the window - 1 tokens before it. Scores are
        softcap * tanh(q·k * scale / softcap), or q·k * scale.
        """
        _check(num_heads % num_kv_heads == 0, f"attention: {num_heads} heads do not share {num_kv_heads} KV heads")
        _check(q.width == num_heads * head_dim, f"attention: q is {q}, not {num_heads} heads of {head_dim}")
        for x in (k, v):
            _check(x.width == num_kv_heads * head_dim, f"attention: {x} is not {num_kv_heads} heads of {head_dim}")
        self._check_activations("attention", q, k, v)
        _check(all(x.rows == "T" for x in (q, k, v)), "attention: works on all tokens of a step, before select_rows")
        _check(window is None or window > 0, f"attention: window={window} is not positive")
        _check(softcap is None or softcap > 0, f"attention: softcap={softcap} is not positive")
        taken = any(node.op == "attention" and node.attrs["layer"] == layer for node in self._nodes)
        _check(not taken, f"attention: layer {layer} has been recorded already")
        attrs: dict[str, Attr] = {
            "layer": layer, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
            "scale": scale, "window": window, "softcap": softcap,
        }  # fmt: skip
        return self._record("attention", (q, k, v), (), attrs, width=q.width)

    # Between workers: models do not call these, passes put them in (shard.py, pipeline.py)

    def all_reduce(self, x: Value) -> Value:
        """The sum of what the tensor-parallel workers have for x, added in rank order, in float32."""
        return self._record("all_reduce", (x,), (), {}, width=x.width, dtype=x.dtype)

    def gather(self, x: Value, widths: tuple[int, ...]) -> Value:
        """The columns of all tensor-parallel workers, of these widths, side by side in rank order: at rank 0 alone."""
        _check(_width(x) in widths, f"gather: {x} is of none of the widths {widths}")
        return self._record("gather", (x,), (), {"widths": widths}, width=sum(widths), dtype=x.dtype)

    def send(self, x: Value) -> Value:
        """Hands x, a residual stream, to the next stage of the pipeline; gives x back."""
        return self._record("send", (x,), (), {}, width=x.width, dtype=x.dtype)

    def recv(self, width: int) -> Value:
        """What the stage before sent, a residual stream: [T, width]."""
        return self._record("recv", (), (), {}, width=width, rows="T", dtype="float32")

    # Recording

    def _gate(self, op: Op, gate: Value, up: Value) -> Value:
        self._check_activations(op, gate, up)
        _check((gate.rows, gate.width) == (up.rows, up.width), f"{op}: {gate} and {up} differ")
        return self._record(op, (gate, up), (), {}, width=gate.width)

    def _check_activations(self, op: Op, *inputs: Value) -> None:
        for x in inputs:
            stream = x.dtype == "float32" != self.dtype
            _check(not stream, f"{op}: {x} is the residual stream, which a norm must read first")

    def _record(
        self,
        op: Op,
        inputs: tuple[Value, ...],
        weights: tuple[Weight, ...],
        attrs: dict[str, Attr],
        *,
        width: int | None,
        rows: Rows | None = None,
        dtype: DType | None = None,
    ) -> Value:
        for value in inputs:
            self._check_known(value)
        output = Value(f"%{len(self._nodes)}", dtype or self.dtype, rows or inputs[0].rows, width)
        self._values[output.name] = output
        self._nodes.append(Node(op, inputs, weights, attrs, output))
        return output

    def _weight(self, name: str, dtype: DType, *shape: int) -> Weight:
        weight = Weight(name, dtype, shape)
        known = self._weights.setdefault(name, weight)
        _check(known == weight, f"{weight} is used as {known} elsewhere")
        return weight

    def _check_known(self, value: Value) -> None:
        _check(self._values.get(value.name) == value, f"{value} does not belong to this graph")


def _width(x: Value) -> int:
    if x.width is None:
        raise ValueError(f"{x} has no columns")
    return x.width


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
