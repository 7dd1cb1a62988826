"""`potluck up --on ray | kubernetes`: engines on the machines of an existing cluster."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import option

from potluck.cli.common.files import option_group
from potluck.cli.common.inputs import pairs
from potluck.core.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from potluck.control.control_values import Launcher
    from potluck.control.launchers.engine_command import EngineCommands
    from potluck.control.local_stack import LocalStackSettings
    from potluck.control.market import ClusterNode, Spellings
    from potluck.control.state_store import StateStore
    from potluck.spec.spec_values import Spec


ON = "on"  # Under which the state has where its engines are.
ENGINE_KEY = "engine.key"


cluster_options = option_group(
    option(
        "--on", default="here", type=click.Choice(["here", "ray", "kubernetes"]), help="Where engines run."
    ),
    option("--cluster", default="auto", help="With --on: cluster address. auto: the configured one."),
    option("--image", default="potluck", help="With --on kubernetes: engine image."),
    option("--namespace", default="potluck", help="With --on kubernetes: namespace of engines."),
    option(
        "--gpu-label",
        "gpu_labels",
        multiple=True,
        metavar="GPU=NAME",
        help="With --on: the cluster's name of a GPU type.",
    ),
    option(
        "--engine-tls",
        nargs=3,
        metavar="CERTIFICATE KEY AUTHORITY",
        help="With --on ray: TLS files on every machine; %host% in a name is its address.",
    ),
    option("--host", default="127.0.0.1", help="Address that clients use."),
)


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    on: str = "here"
    cluster: str = "auto"
    image: str = "potluck"
    namespace: str = "potluck"
    gpu_labels: tuple[str, ...] = ()
    engine_tls: tuple[str, str, str] | None = None
    host: str = "127.0.0.1"

    @classmethod
    def of(cls, options: dict[str, Any]) -> ClusterTarget:
        """Take what is ours out of a command's options."""
        return cls(**{field.name: options.pop(field.name) for field in fields(cls)})

    def spec_there(self, spec: Spec) -> Spec:
        if self.on == "here":
            return spec
        if spec.pool is not None:
            raise InputError(
                "--on", "pools of named machines run with `potluck export commands`; write a fleet"
            )
        from potluck.control.market import ClusterMarket

        there = self._nodes_there(spec)
        market = ClusterMarket(lambda: there, self._spellings(spec), spec.regions)
        market.look()
        return replace(spec, regions=market.regions)

    def settled(self, settings: LocalStackSettings, spec: Spec) -> LocalStackSettings:
        """With who starts engines there, what they ask for, and what the cluster has as the market."""
        if self.engine_tls is not None and self.on != "ray":
            raise InputError("--engine-tls", "is for --on ray, where addresses are machines' own")
        if self.on == "here":
            return settings
        from potluck.control.launchers.engine_command import EngineCommands
        from potluck.control.market import ClusterMarket
        from potluck.control.state_store import written
        from potluck.spec.load_spec import load_spec

        key_file = settings.folder / ENGINE_KEY
        if not key_file.exists():
            written(key_file, secrets.token_urlsafe(32))
        assert isinstance(settings.maker, EngineCommands)
        engine_commands = replace(settings.maker, tls=self.engine_tls)
        launcher = self._launcher(
            engine_commands, self._spellings(spec), [region.name for region in spec.regions], settings.folder
        )
        # The gateway reads the spec as it is written; it is told what the cluster has instead.
        assert settings.spec is not None, "only a plan over attached servers has no spec"
        written_regions = load_spec(settings.spec).regions
        market = ClusterMarket(launcher.there, self._spellings(spec), written_regions, settings.market)
        words = (*settings.gateway, f"--engine-key-file={key_file}")
        if self.engine_tls is not None:
            words = (*words, f"--engine-ca={self.engine_tls[2]}")
        return replace(settings, maker=engine_commands, launcher=launcher, market=market, gateway=words)

    def remembered(self, store: StateStore) -> None:
        """Record the cluster in the store, for a later `potluck down`."""
        message: Mapping[str, Any] = store.get(ON) or {}
        place = str(message.get("on", "here"))
        if place != self.on and store.instances():
            raise InputError("--on", f"{self.on}: engines of this state are on {place}; `potluck down` first")
        secured = list(self.engine_tls or ())
        if message.get("engine_tls", []) != secured and store.instances():
            raise InputError("--engine-tls", "is not as engines of this state have it; `potluck down` first")
        texts = {"on": self.on, "cluster": self.cluster, "namespace": self.namespace}
        store.set(ON, {**texts, "engine_tls": secured})

    def _spellings(self, spec: Spec) -> Spellings:
        from potluck.control.market import spellings_of

        names = {node.gpu.name for node in spec.node_types}
        spellings = spellings_of(spec.node_types, _aliases, pairs("--gpu-label", self.gpu_labels, names))
        if self.on == "kubernetes":
            from potluck.control.launchers.kubernetes_pods import spelled_out

            return {node: spelled_out(type_labels) for node, type_labels in spellings.items()}
        return spellings

    def _nodes_there(self, spec: Spec) -> tuple[ClusterNode, ...]:
        if self.on == "kubernetes":
            from potluck.control.launchers.kube_api import connect as connected
            from potluck.control.launchers.kubernetes_pods import there_now

            return there_now(connected(self.cluster), [region.name for region in spec.regions])
        from potluck.control.launchers.ray_actors import cluster_nodes, must_name_regions
        from potluck.control.launchers.ray_launcher import connect

        nodes = connect(self.cluster).nodes()
        must_name_regions(nodes, {region.name for region in spec.regions})
        return cluster_nodes(nodes)

    def _launcher(
        self, engine_commands: EngineCommands, names: Spellings, regions: Sequence[str], folder: Path
    ) -> Any:
        key = (folder / ENGINE_KEY).read_text("utf-8") if (folder / ENGINE_KEY).exists() else ""
        at = (folder / "logs", str((folder / "state.db").resolve()))
        if self.on == "kubernetes":
            from potluck.control.launchers import kube_api, kubernetes_launcher, kubernetes_pods

            manifest_options = kubernetes_pods.ManifestOptions(self.image, self.namespace)
            podded = kubernetes_launcher.KubernetesOptions(
                maker=engine_commands, spellings=names, key=key, cluster=manifest_options
            )
            return kubernetes_launcher.KubernetesLauncher(kube_api.connect(self.cluster), podded, *at)
        from potluck.control.launchers.ray_launcher import RayLauncher, RayOptions, connect

        options = RayOptions(maker=engine_commands, spellings=names, key=key, regions=tuple(regions))
        return RayLauncher(connect(self.cluster), options, *at)


def launcher_of(store: StateStore) -> Launcher | None:
    """Who can end the engines of a state; None: they are processes of this machine."""
    message: Mapping[str, Any] = store.get(ON) or {}
    if message.get("on", "here") == "here":
        return None
    from potluck.control.launchers.engine_command import EngineCommands

    remote_target = ClusterTarget(
        str(message["on"]),
        str(message.get("cluster", "auto")),
        namespace=str(message.get("namespace", "potluck")),
    )
    launcher: Launcher = remote_target._launcher(EngineCommands(), {}, (), store.path.parent)
    return launcher


def _aliases(name: str) -> Sequence[str]:
    from potluck.catalog import gpus

    try:
        return gpus.facts(name).aliases
    except UnknownNameError:  # the spec has figures of its own for it
        return ()
