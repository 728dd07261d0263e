"""Gateways with workers of their own, as operators copy them: Compose and systemd.

Nothing is started here. Command lines are read by the real commands, variables and paths by the
real settings, secrets are made as the files say, and names, ports and volumes must fit together.
"""

from __future__ import annotations

import re
import shlex
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
import yaml

from runtime.cli import main
from runtime.link.link import TcpAddress, read_address, read_token
from runtime.net.tls import Certificate
from runtime.serve.serve_command import check
from runtime.settings.sources import ConfigError
from runtime.worker.command import END_WAIT_S
from tests.project.deploying import (
    USER,
    Json,
    check_health,
    make_secrets,
    parse,
    serving,
    shake_hands,
    text_of,
    working,
)
from tests.test_deploy import (
    COMPOSE,
    DEPLOY,
    ROOT,
    drains_within,
    image_environment,
    seconds,
    settings_of,
    shown,
)

FILES: Final = sorted(path for path in DEPLOY.iterdir() if path.suffix != ".json")


def command_lines(text: str) -> Iterator[list[str]]:
    """What a file's first lines tell an operator to type, of our own commands."""
    for words in shown(text):
        if words[0].rpartition("/")[2] == "antiphon":
            yield words[1:]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_commands_that_are_shown_exist(path: Path) -> None:
    """An operator types what there is not."""
    text = path.read_text()
    for words in command_lines(text):
        parse(words)
    for name in re.findall(r"`antiphon ([^`]+)`", text):
        command: click.Command | None = main
        for word in name.split():
            if not isinstance(command, click.Group):
                break
            command = command.get_command(click.Context(command), word)
            assert command is not None, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_files_that_are_named_exist(path: Path) -> None:
    """An operator looks for a file in vain."""
    for name in re.findall(r"\b(?:deploy|docs)/[\w@.-]+\w", path.read_text()):
        assert (ROOT / name).exists(), name


def test_secrets_are_not_made_twice(tmp_path: Path) -> None:
    """Workers and gateways that run would know each other no more."""
    make_secrets(text_of("compose.workers.yaml"), tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "secrets").iterdir()}
    assert modes == dict.fromkeys(("token", "ca.crt", "ca.key", "tls.crt", "tls.key"), 0o600)
    again = ["sh", DEPLOY / "worker-secrets.sh", "secrets", "worker-1"]
    assert subprocess.run(again, cwd=tmp_path, capture_output=True, check=False).returncode != 0


def test_a_certificate_is_for_its_names_only(tmp_path: Path) -> None:
    """Another machine of the network could be a worker."""
    make_secrets(text_of("compose.workers.yaml"), tmp_path)
    ca, cert, key = (tmp_path / "secrets" / it for it in ("ca.crt", "tls.crt", "tls.key"))
    with pytest.raises(ssl.SSLError, match="worker-9"):
        shake_hands("worker-9", ca, Certificate(cert, key))


# -- Compose --------------------------------------------------------------------------------------

COMPOSED: Final[Json] = yaml.safe_load(text_of("compose.workers.yaml"))
SERVICES: Final[Json] = COMPOSED["services"]
WORKERS: Final = sorted(name for name in SERVICES if name.startswith("worker"))


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compose file, with what its first lines make."""
    folder = tmp_path_factory.mktemp("compose")
    make_secrets(text_of("compose.workers.yaml"), folder)
    return folder


def real_of(service: Json, folder: Path) -> dict[str, Path]:
    """The files that a service is given."""
    secrets = {name: folder / COMPOSED["secrets"][name]["file"] for name in service["secrets"]}
    real = {f"/run/secrets/{name}": path for name, path in secrets.items()}
    for source, target, *_ in (volume.split(":") for volume in service.get("volumes", ())):
        if not source.startswith("."):
            assert source in COMPOSED["volumes"]
            continue
        real |= {f"{target}/{path.name}": path for path in (folder / source).iterdir()}
    return real


def test_the_composed_gateway_reaches_its_workers(composed: Path) -> None:
    """Sessions would wait for workers for ever."""
    gateway = SERVICES["gateway"]
    environ = {**image_environment(), **gateway["environment"]}
    real = real_of(gateway, composed)
    settings = serving(gateway["command"], environ, real)
    addresses = [read_address(it) for it in settings.worker_addresses]
    assert [it.host for it in addresses if isinstance(it, TcpAddress)] == WORKERS
    for address, name in zip(addresses, WORKERS, strict=True):
        worker = SERVICES[name]
        files = real_of(worker, composed)
        assert working(worker["command"], files) == TcpAddress("0.0.0.0", address.port)
        options = parse(worker["command"]).params
        certificate = Certificate(files[str(options["tls_cert"])], files[str(options["tls_key"])])
        shake_hands(name, real[str(settings.worker_ca)], certificate)
        assert read_token(files[str(options["token_file"])]) == read_token(
            real[str(settings.worker_token_file)]
        )
        assert set(worker["networks"]) & set(gateway["networks"]) <= set(COMPOSED["networks"])
        check_health(worker["healthcheck"]["test"][1:], address.port, files)
    assert COMPOSED["networks"]["workers"] == {"internal": True}
    assert settings.record_to is not None
    assert f"recordings:{settings.record_to}" in gateway["volumes"]


def test_composed_services_are_locked_and_end_in_time() -> None:
    """A hole would be root's, or sessions be cut off."""
    for service in (SERVICES["gateway"], *(SERVICES[name] for name in WORKERS)):
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["pull_policy"] == "never"
        assert service["restart"] == "unless-stopped"
        assert "user" not in service  # The image's own, which is not root.
    settings = settings_of({**image_environment(), **SERVICES["gateway"]["environment"]}).settings
    assert drains_within(seconds(SERVICES["gateway"]["stop_grace_period"]), settings)
    assert all(seconds(SERVICES[name]["stop_grace_period"]) > END_WAIT_S for name in WORKERS)
    assert SERVICES["gateway"]["depends_on"] == WORKERS
    assert SERVICES["gateway"]["ports"] == COMPOSE["services"]["antiphon"]["ports"]
    assert SERVICES["keys"] == COMPOSE["services"]["keys"]


def test_the_composition_is_begun_in_an_order_that_works() -> None:
    """A gateway without keys or secrets does not start, again and again."""
    lines = shown(text_of("compose.workers.yaml"))
    assert [words[-1] for words in lines] == [
        "build",
        "keys",
        "NAME",
        *WORKERS[-1:],
        "secrets",
        "--detach",
    ]
    for words in lines:
        if words[0] == "docker":
            assert words[1:4] == ["compose", "-f", "compose.workers.yaml"]
        elif {"-o", "chown"} & set(words):
            assert str(USER) in words


# -- systemd --------------------------------------------------------------------------------------


def of_instance(number: int) -> dict[str, str]:
    """The lines of the template's section `[Service]`, filled in for one instance."""
    text = text_of("antiphon-worker@.service").replace("%i", str(number))
    section = text.partition("[Service]")[2].partition("[Install]")[0]
    lines = [it.partition("=") for it in section.splitlines() if it and not it.startswith("#")]
    found = {name: value for name, _, value in lines}
    every = " ".join(value for name, _, value in lines if name == "Environment")
    for name, value in (it.split("=", 1) for it in every.split()):
        found["ExecStart"] = found["ExecStart"].replace(f"${{{name}}}", value)
    return found


def test_the_units_of_workers_listen_where_the_gateway_looks() -> None:
    """Sessions would wait for workers for ever."""
    settings = settings_of({}, DEPLOY / "gateway.toml").settings
    for number, address in enumerate(settings.worker_addresses):
        program, *words = shlex.split(of_instance(number)["ExecStart"])
        assert program == "/opt/antiphon/bin/antiphon"
        options = parse(words).params
        assert (options["model"], options["listen"]) == ("tiny", address)
        assert options["token_file"] == settings.worker_token_file
    with pytest.raises(ConfigError) as error:
        check(settings)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == [
        "keys",
        "worker_token_file",
    ]


def test_the_units_of_workers_end_and_begin_again() -> None:
    """A lost model would stay lost, and a wrong option be tried for ever."""
    unit = of_instance(0)
    assert seconds(unit["TimeoutStopSec"]) > END_WAIT_S
    assert unit["Restart"] == "on-failure"
    assert unit["RestartPreventExitStatus"] == str(click.UsageError.exit_code)
    assert unit["DynamicUser"] == "yes"
    assert unit["ProtectSystem"] == "strict"
    # It would hide GPUs, as PrivateDevices does.
    assert "ProtectClock" not in unit
    sources = [it[-2] for it in shown(text_of("antiphon-worker@.service")) if it[0] == "install"]
    assert sources == ["deploy/gateway.toml", "deploy/antiphon-worker@.service"]
    assert all((ROOT / it).is_file() for it in sources)
