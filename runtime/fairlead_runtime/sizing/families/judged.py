"""All families that the self-test judges and the plan sizes, in one table.

Owns the table. Counts nothing.
"""

from collections.abc import Mapping

from fairlead_runtime.sizing.families.dense import DENSE
from fairlead_runtime.sizing.families.layer_norms import LAYER_NORMS
from fairlead_runtime.sizing.families.mixtures import MIXTURES
from fairlead_runtime.sizing.families.own_forms import OWN_FORMS
from fairlead_runtime.sizing.families.shared_experts import SHARED_EXPERTS
from fairlead_runtime.sizing.family import Family

SIZED: Mapping[str, Family] = {
    **DENSE,
    **LAYER_NORMS,
    **MIXTURES,
    **SHARED_EXPERTS,
    **OWN_FORMS,
}
