"""Bugs of what a person meets on a terminal: refusals, logs, Ctrl-C, the chat, and the plan."""

from planted.bug import PackageBug

ON_A_TERMINAL = ("functional/commands/test_terminal.py",)
IN_A_CHAT = ("functional/commands/test_chat.py",)
PLANNED = ("unit/operator/test_plan.py",)

BUGS = (
    PackageBug(
        "a chat's key goes to a server that another one names",
        "fairlead_runtime.commands.chat_client:_SameServer.redirect_request",
        "if _origin(newurl) != _origin(req.full_url):",
        "if False:",
        IN_A_CHAT,
    ),
    PackageBug(
        "a model's text steers the terminal",
        "fairlead_runtime.settings.terminal:harmless",
        "if not (stream or sys.stdout).isatty():",
        "if True:",
        IN_A_CHAT,
    ),
    PackageBug(
        "the values of unknown flags are shown",
        "fairlead_runtime.settings.arguments:ArgumentParser._refuse_flags",
        """[arg.partition("=")[0] for arg in unknown if _is_flag(arg)]""",
        "[*unknown]",
        ("unit/processes/test_cli.py",),
    ),
    PackageBug(
        "a chat has no key for the server that it starts",
        "fairlead_runtime.commands.chat:_endpoint",
        "Endpoint(url, key, local=True)",
        "Endpoint(url, local=True)",
        IN_A_CHAT,
    ),
    PackageBug(
        "a server does not take the key of its environment",
        "fairlead_runtime.front.doors:Doors.open",
        "config.api_key_file or os.environ.get(preflight.KEY_VARIABLE)",
        "config.api_key_file",
        ("functional/api/test_serve.py",),
    ),
    PackageBug(
        "Ctrl-C has the grace of SIGTERM",
        "fairlead_runtime.api.ports.server:_signals",
        "            drain.skip_grace()\n",
        "",
        ON_A_TERMINAL,
    ),
    PackageBug(
        "a second Ctrl-C waits for the step that hangs",
        "fairlead_runtime.api.ports.server:_signals",
        "                _end_soon()\n",
        "                pass\n",
        ON_A_TERMINAL,
    ),
    PackageBug(
        "a terminal gets JSON",
        "fairlead_runtime.settings.terminal:as_text",
        "return (stream or sys.stderr).isatty()",
        "return False",
        ON_A_TERMINAL,
    ),
    PackageBug(
        "NO_COLOR changes nothing",
        "fairlead_runtime.settings.terminal:_steers",
        'os.environ.get("NO_COLOR") or ',
        "",
        ON_A_TERMINAL,
    ),
    PackageBug(
        "an output that is not UTF-8 ends a command",
        "fairlead_runtime.cli:main",
        "    terminal.replace_unencodable()\n",
        "",
        ON_A_TERMINAL,
    ),
    PackageBug(
        "a flag's nearest is sought among the engine's settings alone",
        "fairlead_runtime.settings.arguments:ArgumentParser._settings",
        "in self._option_string_actions if",
        "in list(self._option_string_actions)[14:] if",
        ON_A_TERMINAL,
    ),
    PackageBug(
        "a model's files are looked at after the imports",
        "fairlead_runtime.commands.serve:main",
        "        check_model(options.model, config)\n",
        "",
        ON_A_TERMINAL,
    ),
    PackageBug(
        "a missing extra is a traceback",
        "fairlead_runtime.cli:_call",
        'if command is not None and (error.name or "").startswith("fairlead_"):',
        "if command is not None:",
        ON_A_TERMINAL,
    ),
    PackageBug(
        "a start that is refused is an engine that has ended",
        "fairlead_runtime.serving.remote_engine:RemoteEngine._lose",
        "if not self._stopping and not self._refused:",
        "if not self._stopping:",
        ("functional/api/test_serve.py",),
    ),
    PackageBug(
        "a percentage of memory is a share above 1",
        "fairlead_runtime.settings.engine_config:_share",
        "return value / 100 if",
        "return value if",
        ("unit/settings/test_config.py",),
    ),
    PackageBug(
        "keywords of Python are spelled as flags",
        "fairlead_runtime.settings.engine_config:ConfigError.in_python",
        "        error.args = (spelled,)\n",
        "",
        ("unit/settings/test_config.py",),
    ),
    PackageBug(
        "a chat forgets what the model said",
        "fairlead_runtime.commands.chat:_Chat._exchange",
        'self._messages = [*asked, {"role"',
        'self._messages = [{"role"',
        IN_A_CHAT,
    ),
    PackageBug(
        "LLM.chat renders no beginning of the answer",
        "fairlead_runtime.llm:LLM.chat",
        "add_generation_prompt=add_generation_prompt,",
        "add_generation_prompt=False,",
        IN_A_CHAT,
    ),
    PackageBug(
        "a size without its unit is planned",
        "fairlead_operator.commands.plan_input:deployment_of",
        "size.value < LEAST_MEMORY",
        "size.value < 0",
        PLANNED,
    ),
    PackageBug(
        "the settings of a plan without a file are ignored",
        "fairlead_operator.commands.plan_input:_resource",
        "            place[last] = value\n",
        "            pass\n",
        PLANNED,
    ),
    PackageBug(
        "what lacks and what is there look alike",
        "fairlead_runtime.sizing.verdict:_told_apart",
        "    if gib(more) != gib(less):\n",
        "    if True:\n",
        PLANNED,
    ),
    PackageBug(
        "plan goes to the hub unasked",
        "fairlead_operator.commands.plan_input:config_of",
        'source.kind == "hf" and options.download',
        'source.kind == "hf"',
        PLANNED,
    ),
)
