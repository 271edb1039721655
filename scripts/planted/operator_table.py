"""Bugs of the operator."""

from planted.bug import PackageBug

OPERATOR = "operator/fairlead_operator"
BLOCKERS, STATUS = f"{OPERATOR}/decide/pods/blockers.py", f"{OPERATOR}/decide/status.py"
AUTOSCALE, SCALING = (f"{OPERATOR}/decide/scale/{name}.py" for name in ("autoscale", "scaling"))
MANIFESTS, POD_TEMPLATE, ROLLOUT, DIFF, CAPACITY, ALLOWLISTS = (
    f"{OPERATOR}/decide/children/{name}.py"
    for name in ("manifests", "podtemplate", "rollout", "diff", "capacity", "allowlists")
)
UPGRADE, UPGRADES = f"{OPERATOR}/decide/children/upgrade.py", f"{OPERATOR}/upgrades.py"
LEASE, QUEUE, HUB = (
    f"{OPERATOR}/{name}.py" for name in ("cluster/lease", "workqueue", "probe/hub")
)

BUGS = (
    PackageBug(
        "the first failed mount is reported, not the last",
        BLOCKERS,
        "mounts[-1]",
        "mounts[0]",
        ("unit/operator/decide/pods/test_blocker_codes.py",),
    ),
    PackageBug(
        "a quota that needs a request is not named",
        BLOCKERS,
        'if "exceeded quota" in message or "must specify" in message',
        'if "exceeded quota" in message',
        ("unit/operator/decide/pods/test_blocker_codes.py",),
    ),
    PackageBug(
        "quota and refusal are swapped",
        BLOCKERS,
        (
            '                "QuotaExceeded"\n'
            '                if "exceeded quota" in message or "must specify" in message\n'
            '                else "PodsRefused"\n'
        ),
        (
            '                "PodsRefused"\n'
            '                if "exceeded quota" in message or "must specify" in message\n'
            '                else "QuotaExceeded"\n'
        ),
        ("unit/operator/decide/pods/test_blocker_codes.py",),
    ),
    PackageBug(
        "RollingOut is never reported",
        BLOCKERS,
        "if older and not reasons and",
        "if False and older and not reasons and",
        ("unit/operator/decide/pods/test_blocker_codes.py",),
    ),
    PackageBug(
        "of equal blockers the last pod is named",
        BLOCKERS,
        "sorted(reasons, reverse=True)",
        "sorted(reasons)",
        ("unit/operator/decide/pods/test_blocker_codes.py",),
    ),
    PackageBug(
        "a large saving waits like a small one",
        AUTOSCALE,
        "large = 3 * answer.replicas < supply.current",
        "large = False",
        ("unit/operator/decide/scale/test_autoscale_edges.py",),
    ),
    PackageBug(
        "the tolerance is twice as wide downwards",
        AUTOSCALE,
        "abs(demand / supplied - 1) <= policy.tolerance",
        "-2 * policy.tolerance <= demand / supplied - 1 <= policy.tolerance",
        ("unit/operator/decide/scale/test_autoscale_edges.py",),
    ),
    PackageBug(
        "the most pods ignore autoscaling",
        MANIFESTS,
        "return scaling.max_replicas if scaling else resource.spec.replicas",
        "return resource.spec.replicas",
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "the budget lets no pod go",
        MANIFESTS,
        '"maxUnavailable": 1,',
        '"maxUnavailable": 0,',
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "a revision that begins like a commit counts as one",
        MANIFESTS,
        "_COMMIT.fullmatch(",
        "_COMMIT.match(",
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "shared memory is mounted in the wrong container",
        POD_TEMPLATE,
        '    if runtime:\n        mounts.append({"name": "shm"',
        '    if not runtime:\n        mounts.append({"name": "shm"',
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "the current revision is the old one",
        STATUS,
        'status["currentRevision"] = current[-1]',
        'status["currentRevision"] = current[0]',
        ("unit/operator/decide/test_status_edges.py",),
    ),
    PackageBug(
        "one ready pod is available whatever is desired",
        STATUS,
        "available = len(seen.ready_pods()) >= findings.desired > 0",
        "available = len(seen.ready_pods()) > 0",
        ("unit/operator/decide/test_status_edges.py",),
    ),
    PackageBug(
        "a rollout is complete before every pod serves",
        STATUS,
        'return "Complete" if len(seen.serving(findings.revision)) >= findings.desired else',
        'return "Complete" if seen.serving(findings.revision) else',
        ("unit/operator/decide/test_status_edges.py",),
    ),
    PackageBug(
        "the list of decisions grows for ever",
        SCALING,
        "return decisions[:DECISIONS]",
        "return decisions",
        ("unit/operator/decide/test_status_edges.py",),
    ),
    PackageBug(
        "a renewal counts from its answer",
        LEASE,
        "self._renewed = began",
        "self._renewed = self._clock()",
        ("unit/operator/cluster/test_lease.py",),
    ),
    PackageBug(
        "the fence falls as the Lease expires",
        LEASE,
        "FENCE = 10.0",
        "FENCE = 14.9",
        ("unit/operator/cluster/test_lease.py",),
    ),
    PackageBug(
        "failures are never forgotten",
        QUEUE,
        "        self._failures.pop(key, None)\n        if again is not None:",
        "        if again is not None:",
        ("unit/operator/test_workqueue.py",),
    ),
    PackageBug(
        "of two wakes during a pass the later counts",
        QUEUE,
        "else min(woken_for, due)",
        "else max(woken_for, due)",
        ("unit/operator/test_workqueue.py",),
    ),
    PackageBug(
        "a failed fetch is kept for an hour",
        HUB,
        "RETRY_SECONDS if isinstance(answer, HubError) else KEEP_SECONDS",
        "KEEP_SECONDS",
        ("unit/operator/test_edges.py",),
    ),
    PackageBug(
        "an extra pod is taken to need no accelerator",
        ROLLOUT,
        "free < accelerator.count",
        "free < 0",
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "a claim is written again",
        DIFF,
        '_WRITE_ONCE = frozenset({"PersistentVolumeClaim"})',
        "_WRITE_ONCE: frozenset[str] = frozenset()",
        ("unit/operator/decide/children/test_diff.py",),
    ),
    PackageBug(
        "the cache's volume is read-only for the download",
        POD_TEMPLATE,
        '({"readOnly": True} if runtime else {})',
        '({"readOnly": True} if not runtime else {})',
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "a model's claim is mounted in no container",
        POD_TEMPLATE,
        'if runtime and spec.model.where.kind == "pvc":',
        'if not runtime and spec.model.where.kind == "pvc":',
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "the API keys are not mounted",
        POD_TEMPLATE,
        "if runtime and spec.security.api_key_secret_ref.name:",
        "if not runtime and spec.security.api_key_secret_ref.name:",
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "the hub's token is mounted in the runtime",
        POD_TEMPLATE,
        "if not runtime and spec.model.token_secret_ref.name:",
        "if runtime and spec.model.token_secret_ref.name:",
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "the download asks for accelerators",
        POD_TEMPLATE,
        '"resources": _resources(resource, accelerators=False),',
        '"resources": _resources(resource, accelerators=True),',
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "accelerators are selected when none is asked for",
        POD_TEMPLATE,
        "    if accelerator.count:\n        node_selector |=",
        "    if True:\n        node_selector |=",
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "shared memory is on disk",
        POD_TEMPLATE,
        'shared = {"medium": "Memory",',
        'shared = {"medium": "",',
        ("unit/operator/decide/children/test_manifest_edges.py",),
    ),
    PackageBug(
        "maxSurge 0 asks for an extra pod",
        ROLLOUT,
        "    if rollout.max_surge == 0:\n",
        "    if False:\n",
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "a pod on its way out blocks a rollout",
        ROLLOUT,
        ' or pod["metadata"].get("deletionTimestamp"):\n            continue\n        for',
        ":\n            continue\n        for",
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "any refused replica is a shortage of quota",
        ROLLOUT,
        '                and "exceeded quota" in message\n',
        "",
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "a pod without the time of its condition never waits",
        ROLLOUT,
        'stamp or pod["metadata"].get("creationTimestamp") or ""',
        'stamp or ""',
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "a quota of something else limits accelerators",
        ROLLOUT,
        "        if hard is not None:\n            left",
        "        if True:\n            left",
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "a node that is coming is not waited for",
        ROLLOUT,
        "patience = min(deadline, NODE_SECONDS) if expected else ROOM_SECONDS",
        "patience = ROOM_SECONDS",
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "a turn that was just given is forgotten",
        UPGRADE,
        "    running |= {k for k in granted if k != key}\n",
        "",
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "a paused deployment is upgraded with the Ready ones",
        UPGRADE,
        'idle=bool(spec.get("paused")) or not',
        "idle=not",
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "a rollout past its deadline holds nobody",
        UPGRADE,
        '            return "ProgressDeadlineExceeded"\n',
        '            return ""\n',
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "a status of before the turn fails the upgrade",
        UPGRADE,
        '        return ""  # the status is of the time before the turn\n',
        "        pass\n",
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "what is in a list is left out of a spec's hash",
        UPGRADE,
        "return [_asked(item) for item in value]",
        "return [len(value)]",
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "deployments that are not Ready roll beside Ready ones",
        UPGRADE,
        "    if first or running:\n",
        "    if running:\n",
        ("unit/operator/decide/children/test_rollout.py",),
    ),
    PackageBug(
        "a turn is given without reading the cluster",
        UPGRADES,
        "                self._cluster.store.replace(DEPLOYMENT, namespace, bodies, version)\n",
        "                pass\n",
        ("unit/operator/test_upgrades.py",),
    ),
    PackageBug(
        "a turn is not remembered until it is seen",
        UPGRADES,
        "                self._granted.add(key)\n",
        "                pass\n",
        ("unit/operator/test_upgrades.py",),
    ),
    PackageBug(
        "a turn lasts for ever",
        UPGRADES,
        "        self._granted.discard(key)\n",
        "        pass\n",
        ("unit/operator/test_upgrades.py",),
    ),
    PackageBug(
        "every rolling deployment holds the others",
        UPGRADES,
        "({TURN_MARK: self._defaults} if was_ready else {})",
        "{TURN_MARK: self._defaults}",
        ("unit/operator/test_upgrades.py",),
    ),
    PackageBug(
        "a deadline changes the template",
        UPGRADES,
        "return Target(pod_template(resource, self._settings, written), own | kept)",
        "return Target(today, own | kept)",
        ("unit/operator/test_upgrades.py",),
    ),
    PackageBug(
        "a changed spec waits for a turn",
        UPGRADES,
        "        if carried.get(SPEC_MARK, own[SPEC_MARK]) != own[SPEC_MARK]:\n",
        "        if False:\n",
        ("unit/operator/test_upgrades.py",),
    ),
)
