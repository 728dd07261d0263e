"""Settings: declared once, read from files, variables and flags, printed and read again."""

from __future__ import annotations

import os
import string
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.cli import main
from runtime.serve.serve_command import check, warnings
from runtime.settings.settings import (
    PREFIX,
    RECORDINGS,
    TEXT_CHARS_MAX,
    TEXTS_MAX,
    Setting,
    Settings,
    ValueWrongError,
    declared,
    from_text,
    from_toml,
)
from runtime.settings.sources import (
    FILE_BYTES_MAX,
    OTHERS,
    PROBLEMS_MAX,
    ConfigError,
    Effective,
    Source,
    read,
    to_toml,
    written,
)
from tests.project.example_packages import EXAMPLES, install

SETTINGS = declared(Settings)
BY_NAME = {setting.name: setting for setting in SETTINGS}
SERVED = Settings(record_to=RECORDINGS, record_refused=False, detector=None)
"""What a server has where nothing is said."""
NO_FLAGS: Mapping[str, object] = {}
NO_VARIABLES: Mapping[str, str] = {}

TEXTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\"'\\#,=[] \u2028"),
    min_size=1,
    max_size=20,
)
WORDS = st.text(string.ascii_letters + string.digits + ":/.-_*", min_size=1, max_size=12)


def values_of(setting: Setting, texts: st.SearchStrategy[str] = TEXTS) -> st.SearchStrategy[Any]:
    """Any value that a setting may have."""
    if setting.kind == "truth":
        return st.booleans()
    if setting.kind == "texts":
        return st.lists(texts, max_size=3).map(tuple)
    made: st.SearchStrategy[Any] = {
        "number": st.integers(setting.low, setting.high),
        "text": st.sampled_from(setting.choices or ("",)) if setting.choices else texts,
        "path": texts.map(Path),
    }[setting.kind]
    return made | st.none() if setting.optional else made


def all_values(texts: st.SearchStrategy[str] = TEXTS) -> st.SearchStrategy[dict[str, Any]]:
    """A value for each setting."""
    return st.fixed_dictionaries({it.name: values_of(it, texts) for it in SETTINGS})


def some_values(texts: st.SearchStrategy[str] = TEXTS) -> st.SearchStrategy[dict[str, Any]]:
    """Values for some of the settings."""
    return st.fixed_dictionaries({}, optional={it.name: values_of(it, texts) for it in SETTINGS})


def as_text(value: object) -> str:
    """Write a value as a variable or a flag has it."""
    if isinstance(value, tuple):
        return ",".join(value)
    return "" if value is None else str(value)


def written_file(folder: Path, values: Mapping[str, object]) -> Path:
    """Write settings as a file."""
    path = folder / "antiphon.toml"
    path.write_text("".join(f"{name} = {written(value)}\n" for name, value in values.items()))
    return path


def refused(file: str | None = None, *, folder: Path | None = None, **environ: str) -> list[str]:
    """Read a configuration that is wrong; what is said of it, line by line."""
    path = None
    if file is not None:
        assert folder is not None
        path = folder / "antiphon.toml"
        path.write_text(file)
    with pytest.raises(ConfigError) as error:
        read(flags=NO_FLAGS, environ=environ, config=path)
    return str(error.value).splitlines()


# -- declarations -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(Settings)])
def test_every_setting_is_declared(name: str) -> None:
    """A setting could not be set, or its help would say nothing."""
    setting = BY_NAME[name]
    assert setting.help.endswith(".")
    assert setting.flag.startswith("--")
    assert setting.kind != "number" or None not in {setting.low, setting.high}


def test_no_two_settings_are_called_the_same() -> None:
    """A flag would set something else."""
    assert len({it.flag for it in SETTINGS}) == len({it.variable for it in SETTINGS})
    assert len({it.flag for it in SETTINGS}) == len(SETTINGS)
    assert not {it.variable for it in SETTINGS} & OTHERS


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda it: it.name)
def test_a_default_is_a_value(setting: Setting) -> None:
    """A printed configuration of defaults could not be read again."""
    assert from_text(setting, as_text(setting.default)) == setting.default


def test_the_flags_that_operators_know_are_still_there() -> None:
    """A script that starts the server would fail after an update."""
    known = "limit-video-s limit-audio-s chat-idle-s pause-s record worker origin insecure keys "
    known += "tls-cert tls-key drain-s log-format log-level traces durability queue-max voices "
    known += "default-voice static"
    assert {it.flag for it in SETTINGS} >= {f"--{name}" for name in known.split()}


# -- sources ------------------------------------------------------------------------------------


def test_without_a_word_the_defaults_count() -> None:
    """A new server would not do what the help says."""
    effective = read(flags=NO_FLAGS, environ={"PATH": "/bin"})
    assert effective.settings == SERVED
    assert set(effective.sources.values()) == {"default"}


@given(file=some_values(WORDS), variables=some_values(WORDS), flags=some_values(WORDS))
def test_a_later_source_overrules_an_earlier_one(
    tmp_path_factory: pytest.TempPathFactory,
    file: dict[str, Any],
    variables: dict[str, Any],
    flags: dict[str, Any],
) -> None:
    """An operator's flag, or a container's variable, would do nothing."""
    environ = {BY_NAME[name].variable: as_text(value) for name, value in variables.items()}
    config = written_file(tmp_path_factory.mktemp("config"), file)
    effective = read(flags=flags, environ=environ, config=config)
    layers: dict[Source, dict[str, Any]] = {"file": file, "variable": variables, "flag": flags}
    for setting in SETTINGS:
        said = [source for source, layer in layers.items() if setting.name in layer]
        expected = layers[said[-1]][setting.name] if said else setting.default
        assert getattr(effective.settings, setting.name) == expected
        assert effective.sources[setting.name] == (said[-1] if said else "default")


@given(values=all_values())
@example(values={it.name: it.default for it in SETTINGS})
def test_what_is_printed_is_read_as_the_same(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    """A configuration that was kept would start another server than the one it was taken of."""
    settings = Settings(**values)
    sources: dict[str, Source] = dict.fromkeys(values, "variable")
    printed = to_toml(Effective(settings=settings, sources=sources, file=Path("a\"'\n.toml")))
    path = tmp_path_factory.mktemp("config") / "printed.toml"
    path.write_text(printed, "utf-8")
    again = read(flags=NO_FLAGS, environ=NO_VARIABLES, config=path)
    assert again.settings == settings
    assert set(again.sources.values()) == {"file"}


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text='\x7f\0"\\\r\n')
def test_any_text_is_written_as_toml(text: str) -> None:
    """A printed configuration could not be read, or say something else."""
    assert tomllib.loads(f"a = {written(text)}")["a"] == text


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    """A container could not be told of its file without another command line."""
    environ = {"ANTIPHON_CONFIG": str(written_file(tmp_path, {"port": 1}))}
    assert read(flags=NO_FLAGS, environ=environ).settings.port == 1
    (tmp_path / "other").mkdir()
    other = written_file(tmp_path / "other", {"port": 2})
    assert read(flags=NO_FLAGS, environ=environ, config=other).settings.port == 2


def test_an_empty_variable_is_none_where_there_is_none() -> None:
    """A variable could not take back what a file says."""
    settings = read(
        flags=NO_FLAGS, environ={"ANTIPHON_RECORD_TO": "", "ANTIPHON_ORIGINS": ""}
    ).settings
    assert (settings.record_to, settings.origins) == (None, ())
    assert refused(ANTIPHON_PORT="") == ["ANTIPHON_PORT: '' is not a whole number"]
    assert refused(ANTIPHON_HOST="") == ["ANTIPHON_HOST: empty text is not allowed"]
    assert refused(ANTIPHON_TRACES="") == ["ANTIPHON_TRACES: '' is neither true nor false"]


def test_lists_come_with_commas_in_a_variable() -> None:
    """Two origins would be one that no page has."""
    environ = {"ANTIPHON_ORIGINS": "https://a.example, https://b.example"}
    settings = read(flags=NO_FLAGS, environ=environ).settings
    assert settings.origins == ("https://a.example", "https://b.example")
    assert refused(ANTIPHON_ORIGINS="a,,b") == ["ANTIPHON_ORIGINS: empty text is not allowed"]


# -- what is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("prot", "port"),
        ("Queue_Max", "queue_max"),
        ("queue-max", "queue_max"),
        ("chat_idle_s", "idle_s"),
        ("record", "record_to"),
        ("worker", "workers"),
        ("origin", "origins"),
        ("tls_certificate", "tls_cert"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known(
    tmp_path: Path, name: str, meant: str
) -> None:
    """A typing error would leave a default where a limit was meant."""
    (told,) = refused(f'"{name}" = 1', folder=tmp_path)
    assert told.startswith(f"{tmp_path}/antiphon.toml: ")
    assert told.endswith(f"unknown setting; did you mean {meant}?")
    variable = PREFIX + name.upper().replace("-", "_")
    if variable != BY_NAME[meant].variable:
        (told,) = refused(**{variable: "1"})
        assert told == (f"{variable}: unknown setting; did you mean {BY_NAME[meant].variable}?")


def test_a_name_like_none_is_refused_without_a_guess() -> None:
    """A guess that has nothing to do with it would mislead."""
    assert refused(ANTIPHON_XQZW="1") == ["ANTIPHON_XQZW: unknown setting"]


def test_variables_of_ours_that_are_no_settings_are_left_alone() -> None:
    """A server would not start where a client's key is set."""
    environ = dict.fromkeys(OTHERS - {"ANTIPHON_CONFIG"}, "x")
    assert read(flags=NO_FLAGS, environ=environ).settings == SERVED


def test_what_kubernetes_puts_beside_a_service_of_our_name_is_left_alone() -> None:
    """A server would not start in a cluster where its service is called antiphon."""
    address = "tcp://10.0.0.1:8006"
    environ = {
        "ANTIPHON_PORT": address,
        "ANTIPHON_SERVICE_HOST": "10.0.0.1",
        "ANTIPHON_SERVICE_PORT_HTTP": "8006",
        "ANTIPHON_PORT_8006_TCP": address,
        "ANTIPHON_PORT_8006_TCP_ADDR": "10.0.0.1",
    }
    assert read(flags=NO_FLAGS, environ=environ).settings == SERVED


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("port = 70000", "port: 70000 is too large: 0 to 65535"),
        ("port = -1", "port: -1 is too small: 0 to 65535"),
        ("port = true", "port: True is not a whole number"),
        ("port = 1.0", "port: 1.0 is not a whole number"),
        ('port = "8006"', "port: '8006' is not a whole number"),
        ("slots = 0", "slots: 0 is too small: 1 to 1024"),
        ("host = 1", "host: 1 is not text"),
        ('host = ""', "host: empty text is not allowed"),
        ('host = "a\\nb"', "host: 'a\\nb' has a control character"),
        ('durability = "maybe"', "durability: 'maybe' is not one of none, interval, unit"),
        ('default_mode = "speech"', "is not one of video, audio, chat, transcription"),
        ("traces = 1", "traces: 1 is neither true nor false"),
        ('traces = "yes"', "traces: 'yes' is neither true nor false"),
        ('origins = "https://a.example"', "'https://a.example' is not a list of texts"),
        ("origins = [1]", "origins: 1 is not text"),
        (f"origins = {['a'] * (TEXTS_MAX + 1)}", "a list of 65 is too long: at most 64"),
        (f'keys = "{"k" * (TEXT_CHARS_MAX + 1)}"', "a text of 4097 characters: at most 4096"),
        ("keys = {}", "keys: {} is not text"),
        ("port = 1979-05-27", "port: 1979-05-27 is not a whole number"),
    ],
)
def test_a_wrong_value_names_its_file_key_and_limit(tmp_path: Path, line: str, told: str) -> None:
    """An operator would search for the mistake, or a server run with a value nobody meant."""
    (said,) = refused(line, folder=tmp_path)
    assert said.startswith(f"{tmp_path}/antiphon.toml: {line.partition(' ')[0]}: ")
    assert said.endswith(told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("70000", "too large"),
        ("1_0", "not a whole"),
        ("\u0661", "not a whole"),
        ("9" * 99, "not a whole"),
    ],
)
def test_a_wrong_variable_is_named(text: str, told: str) -> None:
    """An operator would search for the mistake in the file."""
    (said,) = refused(ANTIPHON_PORT=text)
    assert said.startswith("ANTIPHON_PORT: ")
    assert told in said
    assert len(said) < 150


def test_a_variable_that_is_not_utf_8_is_refused() -> None:
    """A path would be another one when it is printed."""
    assert "is not UTF-8" in refused(ANTIPHON_KEYS=os.fsdecode(b"/etc/\xff"))[0]


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """An operator would start the server once for each mistake."""
    told = refused("prot = 1\nslots = 0", folder=tmp_path, ANTIPHON_PORT="x")
    assert [next(it for it in ("prot", "slots", "PORT") if it in line) for line in told] == [
        *("prot", "slots", "PORT")
    ]
    many = "".join(f"x{number} = 1\n" for number in range(PROBLEMS_MAX + 5))
    assert len(refused(many, folder=tmp_path)) == PROBLEMS_MAX + 1


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"port = ", "is not TOML"),
        (b"port = 1\nport = 2", "is not TOML"),
        (b"host = '\xff'", "is not UTF-8"),
        (b"#" * (FILE_BYTES_MAX + 1), "more than"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(
    tmp_path: Path, data: bytes, told: str
) -> None:
    """A broken file would be a traceback, or be taken for an empty one."""
    path = tmp_path / "antiphon.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=told) as error:
        read(flags=NO_FLAGS, environ=NO_VARIABLES, config=path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["missing.toml", ".", "nul\0"])
def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, path: str) -> None:
    """A server would start with defaults where its file was moved."""
    with pytest.raises(ConfigError, match=r"cannot be read|path is invalid"):
        read(flags=NO_FLAGS, environ=NO_VARIABLES, config=tmp_path / path)


@given(text=st.text(max_size=30), value=st.none() | st.integers() | st.floats() | st.text())
def test_no_text_and_no_value_breaks_the_reading(text: str, value: object) -> None:
    """A strange variable would be a traceback."""
    told = []
    for setting in SETTINGS:
        for parse in (partial(from_text, setting, text), partial(from_toml, setting, value)):
            try:
                parse()
            except ValueWrongError as error:
                told.append(str(error))
    assert all(line.isprintable() for line in told)


# -- settings together --------------------------------------------------------------------------


def together(**values: object) -> list[str]:
    """Check settings; what is said of them."""
    try:
        check(Settings(**{"model": "scripted", **values}))  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "a.localhost", "::ffff:127.0.0.1"]
)
def test_loopback_needs_no_keys(host: str) -> None:
    """Nobody could try the server."""
    assert together(host=host) == []
    assert warnings(Settings(host=host)) == ()


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "192.168.1.2", "example.org", "localhost.example.org", "::ffff:8.8.8.8"],
)
def test_another_address_needs_keys_or_a_word(host: str, tmp_path: Path) -> None:
    """Whoever finds the port would use the machine, and nobody meant it."""
    (told,) = together(host=host)
    assert all(word in told for word in ("antiphon keys add", "--keys", "--insecure"))
    assert together(host=host, insecure=True) == []
    (warned,) = warnings(Settings(host=host, insecure=True))
    assert "no keys" in warned
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    assert together(host=host, keys=keys) == []
    assert "in the clear" in warnings(Settings(host=host, keys=keys))[0]


def test_a_certificate_and_its_key_come_together_and_are_there(tmp_path: Path) -> None:
    """A server would start without TLS where TLS was meant, or end when the first client comes."""
    here, missing = tmp_path / "here.pem", tmp_path / "missing.pem"
    here.write_text("")
    assert together(tls_cert=here, tls_key=here) == []
    assert together(tls_cert=here)[0].startswith("tls_cert: a certificate needs its private key")
    assert together(tls_key=here)[0].startswith("tls_key: a private key needs its certificate")
    assert together(tls_cert=missing, tls_key=tmp_path) == [
        f"tls_cert: there is no file {missing} that can be read",
        f"tls_key: there is no file {tmp_path} that can be read",
    ]


def test_other_gateways_are_checked(tmp_path: Path) -> None:
    """A server would relay its clients to what is no address."""
    assert together(gateways=("http://10.0.0.2:8006", "https://two.example")) == []
    for text in ("10.0.0.2:8006", "ws://two:8006", "http://two:8006/v1", "http://a@two", "http://"):
        (problem,) = together(gateways=(text,))
        assert (
            problem
            == f"gateways: '{text}' is not an address: http://HOST:PORT or https://HOST:PORT"
        )
    ca = tmp_path / "ca.pem"
    assert together(gateway_ca=ca) == [f"gateway_ca: there is no file {ca} that can be read"]


def test_workers_elsewhere_are_checked(tmp_path: Path) -> None:
    """A server would wait for a worker that cannot be, or send voices over an open network."""
    token, ca = tmp_path / "token", tmp_path / "ca.pem"
    assert together(worker_addresses=("unix:/run/w", "tcp:localhost:7")) == []
    assert together(worker_addresses=("/run/w",)) == [
        "worker_addresses: '/run/w' is not an address: unix:PATH or tcp:HOST:PORT"
    ]
    assert together(worker_addresses=("tcp:gpu-1:7000",)) == [
        "worker_addresses: tcp:gpu-1:7000 is not on this machine: give worker_token_file"
    ]
    assert together(worker_token_file=token, worker_ca=ca) == [
        f"worker_ca: there is no file {ca} that can be read",
        f"worker_token_file: {token}: cannot be read: No such file or directory",
    ]
    token.write_text("0123456789abcde\n")
    assert "a token of 15 characters, at least 16" in together(worker_token_file=token)[0]
    token.write_text("0123456789abcdef\n")
    assert together(worker_addresses=("tcp:gpu-1:7000",), worker_token_file=token) == []


@pytest.mark.parametrize(
    "given", [{"isolate": True}, {"workers": ("tiny",)}, {"slots": 2}, {"device": "cpu"}]
)
def test_what_workers_elsewhere_decide_is_not_set_here(given: dict[str, Any]) -> None:
    """An operator would believe in slots that no worker has."""
    (told,) = together(worker_addresses=("unix:/run/w",), **given)
    assert told.startswith(f"{next(iter(given))}: give it to `antiphon workers start`")


def test_a_placement_of_a_package_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would start without what it needs, or with settings that no worker gets."""
    (told,) = together(placement="ray")
    assert told.startswith("placement: no package offers 'ray': choose from auto; ")
    assert told.endswith("pip install ./examples/ray_placement")
    install(tmp_path, "ray_placement", EXAMPLES / "ray_placement")
    monkeypatch.syspath_prepend(tmp_path)
    (told,) = together(placement="rey")
    assert told == "placement: no package offers 'rey': choose from auto, ray; did you mean ray?"
    on_ray = partial(together, placement="ray")
    assert on_ray(workers_wanted=8, model="/models/on-the-nodes") == []
    assert on_ray(workers_wanted=2, workers_max=2, placement="ray:head-1:6379") == []
    assert on_ray(workers_wanted=3, workers_max=2) == [
        "workers_max: 2 is less than workers_wanted, 3"
    ]
    assert on_ray(placement="ray:ray://head:10001") == [
        "placement: 'ray://head:10001' is not the HOST:PORT of a Ray cluster"
    ]
    (told,) = on_ray(isolate=True)
    assert told == "isolate: leave it out, or placement ray, which has workers of its own"
    (told,) = together(workers_max=2)
    assert told == "workers_max: it is for a placement that starts workers, such as ray"


def test_what_is_named_is_looked_for(tmp_path: Path) -> None:
    """A server would load a model for minutes, and then not find its keys."""
    told = together(
        keys=tmp_path / "keys.toml",
        voices=tmp_path / "voices",
        static=tmp_path / "pages",
        workers=("no-such-model",),
        origins=("app.example", "*"),
        ping_s=60,
        pong_wait_s=60,
    )
    assert [line.partition(":")[0] for line in told] == [
        *("keys", "origins", "workers", "voices", "static", "pong_wait_s")
    ]
    assert together(ping_s=0, pong_wait_s=1) == []


def test_a_default_voice_is_the_name_of_one(tmp_path: Path) -> None:
    """Pages would begin without a voice, and nobody know why."""
    assert together(default_voice="anna", voices=tmp_path) == []
    assert together(default_voice="anna")[0].startswith("default_voice: ")
    for name in ("../anna", "anna/bo", ".anna"):
        assert together(default_voice=name, voices=tmp_path)[0].startswith("default_voice: ")


@pytest.mark.parametrize("name", ["keys", "tls_key", "record_to"])
def test_pages_do_not_hold_what_is_secret(tmp_path: Path, name: str) -> None:
    """Everyone could read keys and recordings that lie among the pages."""
    pages, link = tmp_path / "pages", tmp_path / "link"
    (pages / "deep").mkdir(parents=True)
    link.symlink_to(pages)
    held = pages / "deep" / "held"
    held.write_text("")
    others = {"tls_cert": held} if name == "tls_key" else {}
    for folder in (pages, link):
        told = together(static=folder, **{name: held}, **others)
        assert any(
            line == f"static: {folder} holds {name}, {held}: every client could read it there"
            for line in told
        )
    beside = tmp_path / "beside"
    beside.write_text("")
    assert not [line for line in together(static=pages, **{name: beside}) if "holds" in line]


def test_every_origin_is_welcome_with_keys_alone(tmp_path: Path) -> None:
    """Any page that someone opens on the machine could use its server."""
    assert together(origins=("*",)) == [
        "origins: the origin * needs keys: any page could use the server"
    ]
    (tmp_path / "keys.toml").write_text("")
    assert together(origins=("*",), keys=tmp_path / "keys.toml") == []


# -- the command --------------------------------------------------------------------------------


def serve(*arguments: str, **environ: str) -> Result:
    """Run `antiphon serve` in this process, with nothing of ours in the environment."""
    clean: dict[str, str | None] = {name: None for name in os.environ if name.startswith(PREFIX)}
    return CliRunner(env=clean | environ).invoke(main, ("serve", *arguments))


def test_the_command_prints_what_it_would_run_with(tmp_path: Path) -> None:
    """Nobody could tell which of four sources a server listens to."""
    config = written_file(tmp_path, {"port": 1, "slots": 3, "idle_s": 9})
    flags = ("--chat-idle-s", "7", "--origin", "https://a,b.example", "--origin", "c", "--traces")
    shown = serve("--config", str(config), "--print-config", "-v", *flags, ANTIPHON_SLOTS="4")
    # It is printed also where the settings do not fit together, which is said then.
    assert "'https://a,b.example' is not an origin" in shown.stderr
    lines = shown.stdout.splitlines()
    assert "port = 1  # file" in lines
    assert "slots = 4  # variable ANTIPHON_SLOTS" in lines
    assert "idle_s = 7  # flag --chat-idle-s" in lines
    assert 'origins = ["https://a,b.example", "c"]  # flag --origin' in lines
    assert 'log_level = "info"  # flag --log-level' in lines
    assert "traces = true  # flag --traces" in lines
    assert 'host = "127.0.0.1"  # default' in lines


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--no-record",), 'record_to = ""  # flag --record: nothing is recorded'),
        (("--no-record", "--record", "x"), 'record_to = ""  # flag --record: nothing is recorded'),
        (("--record", "x"), 'record_to = "x"  # flag --record'),
        (("-v", "--log-level", "debug"), 'log_level = "debug"  # flag --log-level'),
        (("--no-insecure",), "insecure = false  # flag --insecure"),
        (("--port", "8006"), "port = 8006  # flag --port"),
        (
            ("--slots", ""),
            'slots = ""  # flag --slots: 8 for tiny; for a folder as many as fit '
            "into memory, at most 64",
        ),
    ],
)
def test_a_flag_that_is_given_counts(arguments: tuple[str, ...], line: str) -> None:
    """A flag that is the default, or takes something back, would not overrule a file."""
    shown = serve("--print-config", *arguments, ANTIPHON_SLOTS="2", ANTIPHON_INSECURE="true")
    assert shown.exit_code == 0, shown.output
    assert line in shown.stdout.splitlines()


def test_a_configuration_that_is_wrong_starts_nothing(tmp_path: Path) -> None:
    """A server would run with settings that nobody meant."""
    config = written_file(tmp_path, {"prot": 1})
    wrong = serve("--config", str(config))
    assert wrong.exit_code == 2
    assert f"{config}: prot: unknown setting; did you mean port?" in wrong.stderr
    assert serve("--host", "0.0.0.0").exit_code == 2
    assert serve("--config", str(tmp_path / "missing")).exit_code == 2


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda it: it.name)
def test_the_help_tells_every_setting(setting: Setting) -> None:
    """An operator would not learn of it."""
    shown = " ".join(serve("--help-all").output.split())
    assert f" {setting.flag}" in shown
    assert setting.help[:40] in shown
