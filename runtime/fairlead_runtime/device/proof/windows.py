"""The windows that are served, compared with the masks of transformers' own code.

Owns the comparison at positions that no prompt of the self-test reaches. A mask is a rule of two
positions, which a probe keeps for each layer: so no token is computed, however wide a window is.
"""

import torch

from fairlead_runtime.device.model.paged_attention import MaskRule
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.models.model_error import SelfTestError


@torch.inference_mode()
def check(model: PagedModel, max_model_len: int) -> None:
    """Raise SelfTestError where a layer's window shows a token another key than its mask does, at
    the edges of each window and at the last of ``max_model_len`` tokens. A layer whose code makes
    its mask another way is not compared.
    """
    layers: dict[tuple[int | None, MaskRule], int] = {}
    for layer, window in enumerate(model.windows):
        if layer not in model.rules:  # it has no attention
            continue
        rule = model.rules[layer]
        if rule is not None:
            layers.setdefault((window, rule), layer)
    edges = {window + by for window in model.windows if window for by in (-1, 0, 1)}
    positions = sorted(p for p in {0, *edges, max_model_len - 1} if p < max_model_len)
    query = torch.tensor(positions, device=model.device)[:, None]
    key = torch.arange(max_model_len, device=model.device)
    first = query.new_zeros(())  # of the sequences, and of the heads
    for (window, rule), layer in layers.items():
        ours = (key <= query) & (key > query - (window or max_model_len))
        different = (ours != rule(first, first, query, key)).nonzero()
        if len(different):
            row, token = different[0].tolist()
            does = f"shows token {token} to" if ours[row, token] else f"hides token {token} from"
            raise SelfTestError(
                f"self-test: layer {layer} of {str(model.model.config.model_type)!r}, with window "
                f"{window}, {does} token {positions[row]}, which transformers' mask does not; this "
                "model would generate wrong text"
            )
