"""`fairlead operator`: run the operator until a signal.

The composition root: this module alone turns arguments and environment into Settings.
"""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence

from fairlead_operator import logs
from fairlead_operator.commands.operator_flags import read
from fairlead_operator.health import Health, serve
from fairlead_operator.metrics import Metrics
from fairlead_operator.resource.settings import Settings, SettingsError
from fairlead_runtime.settings import terminal

# Of new containers, between two looks for cycles. Lists of thousands of objects make many and no
# cycle; with Python's own 700, the looks take most of the time that reading a list takes.
GC_THRESHOLD = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 after a signal, 2 for invalid settings."""
    try:
        settings = read(sys.argv[1:] if argv is None else argv, os.environ, socket.gethostname())
        terminal.use(settings.log_format)
        logs.set_up()
        gc.set_threshold(GC_THRESHOLD)
        asyncio.run(_until_signalled(settings))
    except SettingsError as error:
        terminal.refuse("InvalidConfig", str(error))
        return 2
    return 0


async def _until_signalled(settings: Settings) -> None:
    # Imported after parsing: kopf takes seconds, and --help and wrong settings need none of it.
    from fairlead_operator.app import Operator

    metrics = Metrics()
    health = Health(metrics.registry)
    try:
        server = serve(health, settings.probe_port)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise SettingsError(
            f"--probe-port {settings.probe_port}: {reason}: choose another"
        ) from None
    work = asyncio.create_task(Operator(settings, health, metrics).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        pass
    finally:
        server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
