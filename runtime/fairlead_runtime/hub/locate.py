"""MODEL → directory for people at a terminal: the download's progress as a bar.

Owns the bar only; models.source knows the forms of MODEL and how to get one.
"""

from pathlib import Path

from tqdm import tqdm

from fairlead_runtime.config import EngineConfig
from fairlead_runtime.hub.fetch import Progress
from fairlead_runtime.hub.source import resolve


def locate(model: str, config: EngineConfig) -> Path:
    """The directory of ``model``, downloaded first when it is on the hub. Raises ModelError or
    ConfigError.
    """
    with tqdm(
        desc="fetching", unit="B", unit_scale=True, leave=False, delay=0.5, disable=None
    ) as bar:

        def report(progress: Progress) -> None:
            bar.total = progress.total
            bar.update(progress.done - bar.n)

        return resolve(model, revision=config.revision, report=report).path
