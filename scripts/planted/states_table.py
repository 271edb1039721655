"""Bugs of layers that keep a state of fixed size, on the device."""

from planted.bug import PackageBug

_LAYERS = ("functional/engine/test_state_layers.py",)
_TEXTS = ("functional/engine/test_states.py",)
_MODEL = "fairlead_runtime.device.model"

BUGS = (
    PackageBug(
        "a sequence begins with the state that lies in its units",
        f"{_MODEL}.state_layers:step_of",
        "None if begins else source[own]",
        "source[own]",
        _LAYERS,
    ),
    PackageBug(
        "a prompt of one token begins with the state that lies in its units",
        f"{_MODEL}.state_layers:step_of",
        "if count == 1 and not begins and not prompt:",
        "if count == 1:",
        _LAYERS,
    ),
    PackageBug(
        "a chunk writes its state where it has read it",
        f"{_MODEL}.state_layers:step_of",
        "end, read, target[own]))",
        "end, read, target[own] if begins else source[own]))",
        _LAYERS,
    ),
    PackageBug(
        "decodes beside chunks continue from each other's states",
        f"{_MODEL}.state_layers:step_of",
        "StateStep(states, at, source[index]",
        "StateStep(states, at, source[index.flip(0)]",
        _LAYERS,
    ),
    PackageBug(
        "a decode writes its state where it has read it",
        f"{_MODEL}.state_layers:StateStep._decode",
        "self.states.write(layer, self.target, cache.states)",
        "self.states.write(layer, self.source, cache.states)",
        _LAYERS,
    ),
    PackageBug(
        "decodes beside chunks get each other's results",
        f"{_MODEL}.state_layers:StateStep.run",
        "parts.append((self.decodes, mixed[:, 0]))",
        "parts.append((self.decodes.flip(0), mixed[:, 0]))",
        _LAYERS,
    ),
    PackageBug(
        "a mixer that forgets counts as one that does not",
        f"{_MODEL}.state_layers:StateMixer.find_whether_it_forgets",
        "self.forgets = recurrent and torch.equal(*outputs)",
        "self.forgets = False",
        _LAYERS,
    ),
    PackageBug(
        "a prompt's token that is computed alone has time steps without bounds",
        f"{_MODEL}.state_layers:StateMixer._compute",
        "elif self.bounds and bounded and states is not None and hidden.shape[1] == 1:",
        "elif False:",
        _LAYERS,
    ),
    PackageBug(
        "generated tokens behind a prompt in one chunk have bounded time steps",
        f"{_MODEL}.state_layers:StateMixer.compute",
        "if self.bounds is None or prompt in (0, hidden.shape[1]):",
        "if True:",
        _TEXTS,
    ),
    PackageBug(
        "a continued scan loses the state before it",
        f"{_MODEL}.state_scans:continued_scan",
        "return out, last + left[:, :, -1]",
        "return out, last",
        _LAYERS,
    ),
    PackageBug(
        "the state before a continued scan does not fade",
        f"{_MODEL}.state_scans:continued_scan",
        "step.float().cumsum(-1)[..., None]",
        "step.float()[..., None]",
        _LAYERS,
    ),
    PackageBug(
        "a convolution's kept inputs are those one token earlier",
        f"{_MODEL}.state_cache:StateCache.update_conv_state",
        "inputs[..., inputs.shape[-1] - kept.shape[-1] :]",
        "inputs[..., inputs.shape[-1] - kept.shape[-1] - 1 : -1]",
        _LAYERS,
    ),
    PackageBug(
        "a convolution keeps one input less than it needs",
        f"{_MODEL}.state_cache:FirstStates.update_conv_state",
        "conv_kernel_size - 1)",
        "conv_kernel_size - 2)",
        _LAYERS,
    ),
    PackageBug(
        "a step reads the first version of a state, however old",
        f"{_MODEL}.batch:BatchBuilder._states",
        "else row.sequence.state_source()",
        "else row.sequence.states[0]",
        _LAYERS,
    ),
    PackageBug(
        "a second pass of a step continues from the state before the first",
        f"{_MODEL}.batch:BatchBuilder._states",
        "if row.sequence.id in continues",
        "if False",
        _TEXTS,
    ),
    PackageBug(
        "the next decodes read the states that the last ones read",
        f"{_MODEL}.batch:BatchBuilder.build",
        "self._follows and batch.states is None and not ahead",
        "self._follows and not ahead",
        _TEXTS,
    ),
    PackageBug(
        "all of a state is read from its first unit",
        "fairlead_runtime.device.memory.state_units:StateUnits.read",
        "units[:, span.unit]",
        "units[:, 0]",
        _LAYERS,
    ),
    PackageBug(
        "each unit of a layer's state gets the same bytes",
        "fairlead_runtime.device.memory.state_units:StateUnits.write",
        "            at += count\n",
        "            at = 0\n",
        _TEXTS,
    ),
    PackageBug(
        "the self-test's fork begins with the state behind its token",
        "fairlead_runtime.device.proof.selftest:_paged_logits",
        "(first.turn - 1) % len(first.states)",
        "first.turn % len(first.states)",
        _LAYERS,
    ),
    PackageBug(
        "a plan for states of other sizes is served",
        f"{_MODEL}.paged_model:prepare",
        "expected = (shape.windows, shape.sources, shape.kv_widths, shape.mixed, states)",
        "expected = (shape.windows, shape.sources, shape.kv_widths, shape.mixed, "
        "model.state_layout)",
        _LAYERS,
    ),
    PackageBug(
        "an fp8 cache of a model with states is tried",
        "fairlead_runtime.sizing.verdict:_refuse_with_states",
        "if config.fp8_cache:",
        "if False:",
        _LAYERS,
    ),
    PackageBug(
        "another package's gated delta rule is taken where it is installed",
        "fairlead_runtime.models.text_model:",
        'for _package in ("fla", "mamba_ssm",',
        'for _package in ("mamba_ssm",',
        _LAYERS,
    ),
    PackageBug(
        "a GPU keeps the decodes of a model with states",
        "fairlead_runtime.device.warmup.decode_plan:DecodePlan.choose",
        "        elif model.states:\n",
        "        elif False:\n",
        ("unit/device/test_decode_plan.py",),
    ),
)
