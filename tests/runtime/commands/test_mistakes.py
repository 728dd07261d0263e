"""Ten natural mistakes with each command: what is wrong, what to type next, and no traceback.

A row is an exit code, a command line, and words of its answer. The folder has `a.wav`, `a.jpg`, two
recordings and a damaged one, `notes.txt`, settings with mistakes, and empty files and folders. A
usage error of click has its hint ("Try ... --help") in a line of its own.
"""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from runtime.cli import DEV, GROUPS, RECORDINGS, WORKERS, main
from tests.golden.logs import FOLDER

SPEECH: Final = Path(__file__).parents[3] / "fixtures" / "speech"
WITHIN: Final = {"recordings": RECORDINGS, "workers": WORKERS, "dev": DEV, "keys": {}}
MISTAKES_MIN: Final = 10
ON_STDOUT: Final = ("doctor", "recordings verify", "replay")
"""Commands whose verdict is their result."""
ROWS: Final = """
2 | talk | name a WAV file, or give --mic
2 | talk missing.wav | missing.wav: No such file or directory
2 | talk notes.txt | notes.txt: not a sound file that can be read
2 | talk notes.wav | notes.wav: not a sound file that can be read
2 | talk empty.wav | empty.wav: not a sound file that can be read
2 | talk empty | empty: Is a directory
2 | talk a.wav --mic | name a WAV file, or give --mic
2 | talk a.wav --url 127.0.0.1 | --url: '127.0.0.1' is not the address of a server, such as 127.0.0.
1 | talk a.wav --url 127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection refused; is a se
2 | talk a.wav --frame notes.txt | notes.txt: 5 bytes that are not a JPEG
2 | talk a.wav --frame missing.jpg | missing.jpg: No such file or directory
2 | talk a.wav --mode chat | Invalid value for '--mode': 'chat' is not one of 'video', 'audio'
2 | talk a.wav --mode vidio | Invalid value for '--mode': 'vidio' is not one of 'video', 'audio';
2 | talk a.wav --wait-s -1 | Invalid value for '--wait-s': -1 is not in the range 0<=x<=600.
2 | talk a.wav --reply nowhere/x.wav | --reply: there is no folder nowhere
2 | talk a.wav --reply a.wav | --reply: a.wav would be overwritten
2 | talk a.wav a.jpg | Got unexpected extra argument (a.jpg)
1 | talk a.wav --key "no key" --url 127.0.0.1:1 | a key has only letters, digits and -._~+/
2 | talk --mic --fast | --fast needs a file
2 | talk a.jpg | a.jpg: not a sound file that can be read
2 | door --url 127.0.0.1 | --url: '127.0.0.1' is not the address of a server, such as 127.0.0.
2 | door --url ftp://voice.example | --url: 'ftp://voice.example' is not the address of a server
2 | door --gateway 127.0.0.1:8006 | No such option '--gateway'
2 | door --listen 8007 | '8007' is not an address: unix:PATH or tcp:HOST:PORT
2 | door --listen tcp:0.0.0.0:8007 | tcp:0.0.0.0:8007 can be reached from other machines: name one
2 | door --address voice.example | --address voice.example: give an IPv4 address
2 | door --ports 50000 40000 | --ports 50000 40000: the first is above the last
2 | door --ports 80 90 | Invalid value for '--ports': 80 is not in the range 1024<=x<=65535.
2 | door --ports 40000 | Option '--ports' requires 2 arguments.
2 | door --calls-max 0 | Invalid value for '--calls-max': 0 is not in the range 1<=x<=1000.
1 | door --listen unix:missing/door | cannot listen on unix:missing/door: No such file or directory
1 | chat "hi" --url 127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection refused; is a ser
1 | chat "hi" --url https://127.0.0.1:1 | cannot connect to wss://127.0.0.1:1: connection refused;
2 | chat "hi" --image missing.png | missing.png: No such file or directory
2 | chat "hi" --image notes.txt | notes.txt: 5 bytes that are no JPEG, PNG or WebP
2 | chat "hi" --audio notes.txt | notes.txt: not a sound file that can be read
2 | chat "hi" --video a.jpg | a.jpg: 6697 bytes that are no video of MP4, QuickTime, Matroska or W
2 | chat "hi" --voice anna | --voice needs --speak
2 | chat "hi" --speak empty | --speak: empty is a folder
2 | chat "hi" --max-tokens 0 | Invalid value for '--max-tokens': 0 is not in the range 1<=x<=8192.
2 | chat "hi" --temperature 3 | Invalid value for '--temperature': 3.0 is not in the range 0<=x<=2
2 | chat hello there | Got unexpected extra argument (there); words that belong together need quot
2 | chat "hi" --dialect openai | Invalid value for '--dialect': 'openai' is not one of 'realtime',
2 | chat "" | there is no question
2 | chat "hi" --sytem x | No such option '--sytem'. (Did you mean one of: '--no-stream', '--stream
2 | chat hi --no-recrd | --no-record
2 | transcribe | Missing argument 'FILE'.
2 | transcribe missing.wav | missing.wav: No such file or directory
2 | transcribe notes.txt | notes.txt: not a sound file that can be read
2 | transcribe empty | empty: Is a directory
1 | transcribe a.wav --url 127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection refused; i
2 | transcribe a.wav --url localhost | --url: 'localhost' is not the address of a server, such as 12
2 | transcribe a.wav b.wav | Got unexpected extra argument (b.wav)
2 | transcribe a.jpg | a.jpg: not a sound file that can be read
2 | transcribe empty.wav | empty.wav: not a sound file that can be read
2 | transcribe a.session.zst | a.session.zst: not a sound file that can be read
2 | transcribe a.wav --fast | No such option '--fast'.
1 | transcribe a.wav --key "" --url 127.0.0.1:1 | a key has only letters, digits and -._~+/
2 | transcribe a.wav --no-recrd | --no-record
2 | serve --model nothing | model: unknown model 'nothing': choose from tiny, scripted, or name th
1 | serve --model empty | cannot load the model empty: empty: config.json: No such file or directo
2 | serve --model notes.txt | model: unknown model 'notes.txt': choose from tiny, scripted, or nam
2 | serve --transcriber moonshin | transcriber: unknown model 'moonshin': choose from tiny, scripted
2 | serve --transcriber moonshin | or moonshine, which transcribes; did you mean moonshine?
2 | serve --slots x --queue-max -1 | Invalid value for '--slots': 'x' is not a whole number
2 | serve --slots x --queue-max -1 | Invalid value for '--queue-max': -1 is too small: 0 to
2 | serve --model tinny | model: unknown model 'tinny': choose from tiny, scripted, or name the fo
2 | serve --port 99999 | Invalid value for '--port': 99999 is too large: 0 to 65535
2 | serve --prot 8007 | No such option '--prot'. (Did you mean one of: '--host', '--port', '--slot
2 | serve --port abc | Invalid value for '--port': 'abc' is not a whole number
2 | serve --host 0.0.0.0 | host: 0.0.0.0 is not a loopback address, and there are no keys. Make one
2 | serve --tls-cert missing.crt | tls_cert: a certificate needs its private key, tls_key
2 | serve --keys missing.toml | keys: missing.toml: cannot be read: No such file or directory
2 | serve --config missing.toml | missing.toml: cannot be read: No such file or directory
2 | serve --config bad.toml | bad.toml: port: 'x' is not a whole number
2 | serve --config typo.toml | typo.toml: prot: unknown setting; did you mean port?
2 | serve --config broken.toml | broken.toml: is not TOML: Invalid value (at line 1, column 8)
1 | serve --record notes.txt | cannot record to notes.txt: File exists
2 | serve --static missing | static: there is no folder missing
2 | serve --store ftp://bucket | store: ftp://bucket: not the URL of a store, which begins with one
2 | serve --slots 0 | Invalid value for '--slots': 0 is too small: 1 to 1024
2 | serve --open --no-pages | --open needs pages, which --no-pages turns off
2 | serve tiny | Got unexpected extra argument (tiny); a model is named with --model tiny
2 | serve --worker-address nothing | worker_addresses: 'nothing' is not an address: unix:PATH or tc
2 | demo --model nothing | Invalid value for '--model': 'nothing' is not one of 'tiny', 'scripted'
2 | demo --speech missing.wav | missing.wav: No such file or directory
2 | demo --speech notes.txt | notes.txt: not a sound file that can be read
2 | demo --frame notes.txt | notes.txt: 5 bytes that are not a JPEG
2 | demo --record notes.txt | Invalid value for '--record': Directory 'notes.txt' is a file.
2 | demo --samples notes.txt | Invalid value for '--samples': Directory 'notes.txt' is a file.
2 | demo tiny | Got unexpected extra argument (tiny); a model is named with --model tiny
2 | demo --speech empty | empty: Is a directory
2 | demo --fats | No such option '--fats'. (Did you mean one of: '--fast', '--frame'?)
2 | demo --json --record notes.txt/x | --record: notes.txt/x: Not a directory
1 | doctor --model nothing | nothing cannot be served
1 | doctor --model empty | empty cannot be served
1 | doctor --model notes.txt | notes.txt cannot be served
2 | doctor empty | Got unexpected extra argument (empty); a model is named with --model empty
2 | doctor --slots 0 | Invalid value for '--slots': 0 is too small: 1 to 1024
2 | doctor --device tpu | Invalid value for '--device': 'tpu' is not one of cpu, cuda; did you mean
2 | doctor --dtype int8 | Invalid value for '--dtype': 'int8' is not one of fp32, fp16, bf16
2 | doctor --modle tiny | No such option '--modle'. Did you mean '--model'?
2 | doctor --model | Option '--model' requires an argument
2 | doctor tiny scripted | Got unexpected extra arguments (tiny scripted); a model is named
2 | keys add | Missing argument 'NAME'.
2 | keys add "two words" --file k.toml | a name is 1 to 64 letters, digits and _.@-, a letter or d
2 | keys add anna | Missing option '--file' (env var: 'ANTIPHON_KEYS').
2 | keys add anna --file empty | Invalid value for '--file' (env var: 'ANTIPHON_KEYS'): File 'empt
1 | keys add anna --file bad.toml | bad.toml: holds something that is not a [[key]]
1 | keys add anna --file nowhere/k.toml | nowhere: cannot be opened: No such file or directory
2 | keys add anna --scope king --file k.toml | Invalid value for '--scope': 'king' is not one of '
2 | keys add -x | No such option '-x'.
2 | keys add anna --file k.toml --expires x | No such option '--expires'.
2 | keys add anna bert --file k.toml | Got unexpected extra argument (bert)
1 | keys list --file missing.toml | missing.toml: cannot be read: No such file or directory
2 | keys list | Missing option '--file' (env var: 'ANTIPHON_KEYS').
2 | keys list extra --file k.toml | Got unexpected extra argument (extra)
2 | keys list --file empty | Invalid value for '--file' (env var: 'ANTIPHON_KEYS'): File 'empty' i
1 | keys list --file notes.txt | notes.txt: is not TOML: Expected '=' after a key in a key/value pa
1 | keys list --file bad.toml | bad.toml: holds something that is not a [[key]]
1 | keys list --file nowhere/k.toml | nowhere/k.toml: cannot be read: No such file or directory
2 | keys list --jsn --file k.toml | No such option '--jsn'.
1 | keys list --file a.wav | a.wav: is not UTF-8
1 | keys list --file typo.toml | typo.toml: holds something that is not a [[key]]
1 | keys remove anna --file missing.toml | missing.toml: cannot be read: No such file or directory
2 | keys remove nobody | Missing option '--file' (env var: 'ANTIPHON_KEYS').
2 | keys remove | Missing argument 'NAME'.
2 | keys remove anna bert --file k.toml | Got unexpected extra argument (bert)
2 | keys remove anna --file empty | Invalid value for '--file' (env var: 'ANTIPHON_KEYS'): File 'e
1 | keys remove anna --file bad.toml | bad.toml: holds something that is not a [[key]]
1 | keys remove anna --file notes.txt | notes.txt: is not TOML: Expected '=' after a key in a key/v
1 | keys remove "a b" --file k.toml | k.toml: cannot be read: No such file or directory
1 | keys remove anna --file nowhere/k.toml | nowhere: cannot be opened: No such file or directory
2 | keys remove anna --yes --file k.toml | No such option '--yes'.
2 | keys renew | Missing argument 'NAME'.
2 | keys renew anna | Missing option '--file' (env var: 'ANTIPHON_KEYS').
1 | keys renew anna --file missing.toml | missing.toml: cannot be read: No such file or directory
2 | keys renew anna bert --file k.toml | Got unexpected extra argument (bert)
2 | keys renew anna --file empty | Invalid value for '--file' (env var: 'ANTIPHON_KEYS'): File 'em
1 | keys renew anna --file bad.toml | bad.toml: holds something that is not a [[key]]
1 | keys renew anna --file notes.txt | notes.txt: is not TOML: Expected '=' after a key in a key/va
1 | keys renew "a b" --file k.toml | k.toml: cannot be read: No such file or directory
1 | keys renew anna --file nowhere/k.toml | nowhere: cannot be opened: No such file or directory
2 | keys renew anna --sessions-max 3 --file k.toml | No such option '--sessions-max'.
2 | keys ad anna | No such command 'ad'. Did you mean 'add'?
2 | workers lst | No such command 'lst'. Did you mean 'list'?
1 | workers list --url 127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection refused; is a
2 | workers list --url nowhere | --url: 'nowhere' is not the address of a server, such as 127.0.0.1:
2 | workers list extra | Got unexpected extra argument (extra)
1 | workers list --key "a b" --url 127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection re
1 | workers list --url http://127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection refused
1 | workers list --url https://127.0.0.1:1 | cannot connect to wss://127.0.0.1:1: connection refus
2 | workers list --url ws:// | --url: 'ws://' is not the address of a server, such as 127.0.0.1:8006
2 | workers list --wait | No such option '--wait'.
2 | workers list --url 127.0.0.1 | --url: '127.0.0.1' is not the address of a server, such as 127.0.
2 | workers list --jsn | No such option '--jsn'. Did you mean '--json'?
2 | workers add | Missing argument 'ADDRESS'.
1 | workers add nothing --url 127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection refused
2 | workers add a b | Got unexpected extra argument (b)
1 | workers add unix:/x --url 127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection refused
2 | workers add tcp:h:1 --url nowhere | --url: 'nowhere' is not the address of a server, such as 127
1 | workers add unix:/x --url http://127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection
2 | workers add unix:/x --wait | No such option '--wait'.
2 | workers add --url 127.0.0.1:1 | Missing argument 'ADDRESS'.
1 | workers add unix:/x --key "a b" --url 127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connec
2 | workers add unix:/x --url ftp://h | is not the address of a server
2 | workers drain | Missing argument 'NUMBER'.
2 | workers drain first | Invalid value for 'NUMBER': 'first' is not a valid whole number.
1 | workers drain 0 --url 127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection refused; is
2 | workers drain -1 | No such option '-1'.
2 | workers drain 0 1 | Got unexpected extra argument (1)
2 | workers drain 0.5 | Invalid value for 'NUMBER': '0.5' is not a valid whole number.
1 | workers drain 0 --wait --url 127.0.0.1:1 | cannot connect to ws://127.0.0.1:1: connection refu
2 | workers drain 99999999999 | Invalid value for 'NUMBER': 99999999999 is not in the range 0<=x<=
2 | workers drain 0 --url ws:// | --url: 'ws://' is not the address of a server, such as 127.0.0.1:8
2 | workers drain 0 --now | No such option '--now'.
2 | workers drain 0 --url 127.0.0.1 | --url: '127.0.0.1' is not the address of a server, such as 127
2 | workers start | Missing option '--listen'.
2 | workers start --model tiny | Missing option '--listen'.
2 | workers start --model nothing --listen unix:s | unknown model 'nothing': choose from tiny, scr
1 | workers start --model empty --listen unix:s | cannot serve empty at unix:s: empty: config.json
2 | workers start --model tiny --listen 127.0.0.1:9000 | '127.0.0.1:9000' is not an address: unix:P
2 | workers start --model tiny --listen tcp:0.0.0.0:9000 | tcp:0.0.0.0:9000 can be reached from ot
1 | workers start --model scripted --listen unix:/nowhere/at/all | cannot serve scripted at unix:/
2 | workers start --model tiny --listen tcp:127.0.0.1:9000 --token-file missing | missing: cannot be
2 | workers start --model tiny --listen tcp:127.0.0.1:9000 --tls-cert a.jpg | --tls-cert and --tls
2 | workers start tiny --listen unix:x | a model is named with --model tiny
2 | recordings lst | No such command 'lst'. Did you mean 'list'?
2 | recordings list missing | missing: there is no such folder
2 | recordings list notes.txt | notes.txt: it is a file, not a folder
2 | recordings list --since yesterday | Invalid value for '--since': 'yesterday' is neither a time
2 | recordings list --since 30 | Invalid value for '--since': '30' is neither a time span, such as
2 | recordings list --where "delay > 1" | Invalid value for '--where': 'delay' is not a measure; d
2 | recordings list --where "response_delay" | Invalid value for '--where': 'response_delay' is no
2 | recordings list --sort delay | Invalid value for '--sort': 'delay' is not a measure; did you m
2 | recordings list --limit 0 | Invalid value for '--limit': 0 is not in the range x>=1.
2 | recordings list --mode speech | Invalid value for '--mode': 'speech' is not one of 'video', 'a
2 | recordings list s3:/bucket | s3:/bucket: there is no such folder
2 | recordings list --state done | Invalid value for '--state': 'done' is not one of 'open', 'fini
2 | recordings inspect | Missing argument 'LOG'.
2 | recordings inspect missing | missing: there is no recording missing in recordings: `antiphon r
2 | recordings inspect last | last: there is no recording last in recordings: `antiphon recordings
2 | recordings inspect notes.txt | notes.txt: this is not a recording: it has no block of a log
2 | recordings inspect empty | empty: it has no recordings, and one is needed: empty/last, or as `
2 | recordings inspect a.wav | a.wav: this is not a recording: it has no block of a log
2 | recordings inspect . | .: it has 3 recordings, and one is needed: ./last, or as `antiphon reco
2 | recordings inspect missing.session.zst | missing.session.zst: No such file or directory
2 | recordings inspect a.session.zst chat.session.zst | Got unexpected extra argument (chat.sessio
2 | recordings inspect a.session.zst --output x | No such option '--output'.
2 | recordings view | Missing argument 'LOG'.
2 | recordings view missing | missing: there is no recording missing in recordings: `antiphon reco
2 | recordings view notes.txt | notes.txt: this is not a recording: it has no block of a log
2 | recordings view a.session.zst --output nowhere/x.html | nowhere/x.html: there is no folder now
2 | recordings view a.session.zst --output a.session.zst | --output a.session.zst is a log: it wou
2 | recordings view a.session.zst --output empty | empty: it is a folder
2 | recordings view a.session.zst --diff missing | missing: there is no recording missing in recor
2 | recordings view a.session.zst --diff notes.txt | notes.txt: this is not a recording: it has no
2 | recordings view empty | empty: it has no recordings, and one is needed: empty/last, or as `ant
2 | recordings view a.session.zst --replya | No such option '--replya'. Did you mean '--replay'?
2 | recordings marks | Missing argument 'LOG'.
2 | recordings marks missing | missing: there is no recording missing in recordings: `antiphon rec
2 | recordings marks a.session.zst --add | Option '--add' requires an argument.
2 | recordings marks a.session.zst --add hi --at x | Invalid value for '--at': 'x' is not a valid
2 | recordings marks a.session.zst --add hi --at -5 | Invalid value for '--at': -5.0 is not in the
2 | recordings marks a.session.zst --remove 7 | a.session.zst: there is no mark 7 next to it
2 | recordings marks notes.txt | notes.txt: this is not a recording: it has no block of a log
2 | recordings marks a.session.zst --at 3 | --add and --at are given together
2 | recordings marks empty --add hi | empty: it has no recordings, and one is needed: empty/last,
2 | recordings marks a.session.zst chat.session.zst | Got unexpected extra argument
2 | recordings verify | Missing argument 'LOG'.
2 | recordings verify missing | missing: there is no recording missing in recordings: `antiphon re
2 | recordings verify notes.txt | this is not a recording: it has no block of a log
2 | recordings verify empty | empty: it has no recordings, and one is needed: empty/last, or as `a
2 | recordings verify a.wav | this is not a recording: it has no block of a log
2 | recordings verify missing.session.zst | missing.session.zst: No such file or directory
2 | recordings verify a.session.zst b.session.zst | Got unexpected extra argument (b.session.zst)
2 | recordings verify . | .: it has 3 recordings, and one is needed: ./last, or as `antiphon recor
2 | recordings verify last | last: there is no recording last in recordings: `antiphon recordings
1 | recordings verify damaged.session.zst |   damage at byte 12160: payload, the payload's crc doe
1 | recordings verify damaged.session.zst | `antiphon recordings recover` keeps what can be read
2 | recordings recover | Missing argument 'LOG|DIR...'.
2 | recordings recover missing | missing: there is no recording missing in recordings: `antiphon r
2 | recordings recover empty | empty: no *.session.zst in it
2 | recordings recover notes.txt | notes.txt: no name can be derived from this one: give --output
2 | recordings recover . --output x.session.zst | --output is for one LOG
2 | recordings recover damaged.session.zst --output a.session.zst | damaged.session.zst: a.session
2 | recordings recover damaged.session.zst --output nowhere/x.session.zst | damaged.session.zst: n
2 | recordings recover damaged.session.zst --output empty | damaged.session.zst: empty: it is a fo
2 | recordings recover --all | No such option '--all'.
2 | recordings recover --output | requires an argument
2 | recordings compact | Missing argument 'LOG|DIR...'.
2 | recordings compact missing | missing: there is no recording missing in recordings: `antiphon r
2 | recordings compact empty | empty: no *.session.zst in it
1 | recordings compact notes.txt | notes.txt: this is not a recording
1 | recordings compact damaged.session.zst | damaged.session.zst: it is damaged; `antiphon recordi
2 | recordings compact . --output x.session.zst | --output is for one LOG
2 | recordings compact a.session.zst --output a.session.zst | a.session.zst: it exists:
2 | recordings compact a.session.zst --output nowhere/x.session.zst | nowhere/x.session.zst: there
2 | recordings compact last | last: there is no recording last in recordings: `antiphon recordings
2 | recordings compact --dry | No such option '--dry'.
2 | recordings compact a.session.zst extra.session.zst | extra.session.zst: no such log
1 | recordings compact a.wav | a.wav: this is not a recording
2 | recordings redact | Missing argument 'LOG'.
2 | recordings redact a.session.zst | give --output or --dry-run
2 | recordings redact missing --output x.session.zst | missing: there is no recording missing in r
2 | recordings redact notes.txt --output x.session.zst | notes.txt: this is not a recording: it has
2 | recordings redact a.session.zst --output a.session.zst | a.session.zst: it exists: g
2 | recordings redact a.session.zst --output nowhere/x.session.zst | nowhere/x.session.zst: there
2 | recordings redact a.session.zst --output x.session.zst --kind sound | Invalid value for '--kin
2 | recordings redact a.session.zst chat.session.zst --output x.session.zst | Got unexpected extra
2 | recordings redact damaged.session.zst --output y.session.zst | damaged.session.zst: damaged at
2 | recordings redact damaged.session.zst --output z.session.zst | `antiphon recordings recover` k
2 | recordings redact empty --output x.session.zst | empty: it has no recordings, and one is neede
2 | recordings prune | Missing argument 'DIR|URL'.
2 | recordings prune missing | give --older-than SPAN, --larger-than SIZE, or both
2 | recordings prune missing --older-than 30d | missing: there is no such folder
2 | recordings prune . | give --older-than SPAN, --larger-than SIZE, or both
2 | recordings prune . --older-than 30 | Invalid value for '--older-than': '30' is not a time span,
2 | recordings prune . --larger-than 50 | Invalid value for '--larger-than': '50' is not a size, su
2 | recordings prune . --older-than month | Invalid value for '--older-than': 'month' is not a time
2 | recordings prune notes.txt --older-than 30d | notes.txt: it is a file, not a folder
2 | recordings prune . --older-than -1d | Invalid value for '--older-than': '-1d' is not a time spa
2 | recordings prune . extra --older-than 30d | Got unexpected extra argument (extra)
2 | replay | Missing argument 'LOG|DIR...'.
2 | replay missing | missing: there is no recording missing in recordings: `antiphon recordings li
2 | replay notes.txt | notes.txt: this is not a recording: it has no block of a log
2 | replay empty | empty: no *.session.zst in it
2 | replay last | last: there is no recording last in recordings: `antiphon recordings list record
2 | replay missing.session.zst | missing.session.zst: No such file or directory
2 | replay a.session.zst --model tiny | --anyway and --model need --full
2 | replay a.session.zst --jobs 0 | Invalid value for '--jobs': 0 is not in the range 1<=x<=64.
2 | replay a.session.zst --full --go-on | --full cannot be combined with --go-on
3 | replay --full a.session.zst --model nothing | the model 'nothing' cannot be loaded: unknown mo
2 | replay damaged.session.zst | `antiphon recordings recover` keeps what can be read
2 | replay a.wav | a.wav: this is not a recording: it has no block of a log
2 | replay --ful a.session.zst | No such option '--ful'. Did you mean '--full'?
2 | fork | Missing argument 'LOG'.
2 | fork missing --at 1 | missing: there is no recording missing in recordings: `antiphon recordin
2 | fork a.session.zst | Missing option '--at'.
2 | fork a.session.zst --at 999 | there is no unit 999: the recording has units 0 to 12
2 | fork damaged.session.zst --at 1 | `antiphon recordings recover` keeps what can be read
2 | fork a.session.zst --at x | Invalid value for '--at': 'x' is not a valid whole number.
2 | fork a.session.zst --at -1 | Invalid value for '--at': -1 is not in the range x>=0.
2 | fork a.session.zst --at 1 --replace-audio missing.wav | missing.wav: No such file or directory
2 | fork a.session.zst --at 1 --replace-audio notes.txt | notes.txt: not a sound file that can be
2 | fork a.session.zst --at 1 --set temprature=0 | --set temprature=0: write NAME=VALUE, with one
2 | fork a.session.zst --at 1 --set temperature | --set temperature: write NAME=VALUE, with one of
3 | fork a.session.zst --at 1 --model nothing | the model 'nothing' cannot be loaded: unknown mode
2 | fork notes.txt --at 1 | notes.txt: this is not a recording: it has no block of a log
2 | fork chat.session.zst --at 1 | a chat cannot be forked: each turn carries its whole conversation
2 | diff | Missing argument 'A'.
2 | diff a.session.zst | Missing argument 'B'.
2 | diff a.session.zst missing | missing: there is no recording missing in recordings: `antiphon r
2 | diff missing a.session.zst | missing: there is no recording missing in recordings: `antiphon r
2 | diff a.session.zst notes.txt | notes.txt: this is not a recording: it has no block of a log
2 | diff a.session.zst empty | empty: it has no recordings, and one is needed: empty/last, or as `
2 | diff a.session.zst chat.session.zst a.session.zst | Got unexpected extra argument (a.session.z
2 | diff last a.session.zst | last: there is no recording last in recordings: `antiphon recordings
2 | diff a.wav a.session.zst | a.wav: this is not a recording: it has no block of a log
2 | diff a.session.zst a.session.zst --jsn | No such option '--jsn'. Did you mean '--json'?
2 | export | Missing argument 'LOG'.
2 | export a.session.zst | give --to, or an --output that ends with .wav, .srt, .vtt, .mp4, .jsonl
2 | export missing --output x.wav | missing: there is no recording missing in recordings: `antipho
2 | export notes.txt --output x.wav | notes.txt: this is not a recording: it has no block of a log
2 | export a.session.zst --output x.mp3 | give --to, or an --output that ends with .wav, .srt, .vt
2 | export a.session.zst --output x | give --to, or an --output that ends with .wav, .srt, .vtt, .
2 | export a.session.zst --output nowhere/x.wav | nowhere/x.wav: there is no folder nowhere
2 | export a.session.zst --output a.session.zst | give --to, or an --output that ends with .wav, .
2 | export a.session.zst --to mp3 --output x.mp3 | Invalid value for '--to': 'mp3' is not one of '
2 | export a.session.zst --output empty | Invalid value for '--output' / '-o': File 'empty' is a d
2 | export empty --output x.wav | empty: it has no recordings, and one is needed: empty/last, or a
2 | eval | name a folder or a log, or give --definitions
2 | eval missing | missing: there is no recording missing in recordings: `antiphon recordings list
2 | eval empty | empty: no *.session.zst in it
2 | eval notes.txt | notes.txt: this is not a recording: it has no block of a log
2 | eval . --fail-if "delay > 1" | Invalid value for '--fail-if': 'delay' is not a measure; did yo
2 | eval . --fail-if "take_over_rate" | Invalid value for '--fail-if': 'take_over_rate' is not a m
2 | eval . --mode open | --mode open needs --model
2 | eval . --model tiny | --model, --out, --jobs, --device and --dtype need --mode open or forc
2 | eval . --baseline missing | missing: no folder of recordings
2 | eval . --by delay | 'delay' is not one of
2 | eval . --html nowhere/x.html | nowhere/x.html: there is no folder nowhere
2 | eval . --suite | suite.toml: there is no suite; make one with --record-suite
2 | eval missing.session.zst --record-suite s | missing.session.zst: no such log
2 | eval . --record-suite empty | empty: it is a folder
2 | eval . --mode opne | Invalid value for '--mode': 'opne' is not one of 'closed', 'open', 'force
2 | dev bech | No such command 'bech'. Did you mean 'bench'?
2 | dev schma | No such command 'schma'. Did you mean 'schema'?
1 | dev schema --output nowhere/x | cannot write nowhere/x: No such file or directory
2 | dev schema --outptu a | No such option '--outptu'. Did you mean '--output'?
2 | dev schema x | Got unexpected extra argument (x)
2 | dev schema --dialect nothing | No such option '--dialect'.
2 | dev schema --output empty | Invalid value for '--output': File 'empty' is a directory.
2 | dev schema --json | No such option '--json'.
2 | dev schema --format yaml | No such option '--format'.
2 | dev schema --output | Option '--output' requires an argument.
2 | dev schema --outpt | No such option '--outpt'. Did you mean '--output'?
2 | dev schema realtime | Got unexpected extra argument (realtime)
2 | dev schema --mode audio | No such option '--mode'.
2 | dev quantize | Missing argument 'FOLDER'.
2 | dev quantize tiny | Missing option '--to'. Choose from:
2 | dev quantize tiny --to int2 | Invalid value for '--to': 'int2' is not one of 'int4', 'int8'
1 | dev quantize nothing --to int4 | unknown model 'nothing': choose from tiny, scripted, or name
1 | dev quantize empty --to int4 | empty: config.json: No such file or directory
1 | dev quantize notes.txt --to int8 | unknown model 'notes.txt': choose from tiny, scripted, or
1 | dev quantize tiny --to int4 --output empty | empty exists
2 | dev quantize tiny --too int4 | No such option '--too'. Did you mean '--to'?
2 | dev quantize --to int4 | Missing argument 'FOLDER'.
2 | dev quantize tiny --to | Option '--to' requires an argument.
2 | dev quantise tiny | No such command 'quantise'. Did you mean 'quantize'?
2 | dev states x | Got unexpected extra argument (x)
2 | dev states --svg | No such option '--svg'.
2 | dev states --json | No such option '--json'.
2 | dev states svg | Got unexpected extra argument (svg)
2 | dev states --help-me | No such option '--help-me'. Did you mean '--help'?
2 | dev states audio | Got unexpected extra argument (audio)
2 | dev states --mode audio | No such option '--mode'.
2 | dev states -o x | No such option '-o'.
2 | dev states --output x | No such option '--output'.
2 | dev states --format svg | No such option '--format'.
2 | dev states chat | Got unexpected extra argument (chat)
2 | dev play | Missing argument 'LOG'.
2 | dev play missing | missing: there is no recording missing in recordings: `antiphon recordings
2 | dev play notes.txt | notes.txt: this is not a recording: it has no block of a log
2 | dev play a.session.zst --speed fast | Invalid value for '--speed': 'fast' is not a valid numbe
2 | dev play a.session.zst --speed -1 | Invalid value for '--speed': -1.0 is not in the range x>=0
2 | dev play a.session.zst --port 99999 | Invalid value for '--port': 99999 is not in the range 0<
2 | dev play damaged.session.zst | `antiphon recordings recover` keeps what can be read
2 | dev play empty | empty: it has no recordings, and one is needed: empty/last, or as `antiphon r
1 | dev play a.session.zst --host nowhere.invalid | cannot listen on nowhere.invalid port 0: Name
2 | dev play a.session.zst chat.session.zst | Got unexpected extra argument
2 | dev play a.session.zst --sped 1 | --speed
2 | dev shrink | Missing argument 'LOG'.
2 | dev shrink a.session.zst | Missing argument 'COMMAND...'.
2 | dev shrink a.session.zst --output x.session.zst | Missing argument 'COMMAND...'.
2 | dev shrink missing --output x.session.zst -- true | missing: there is no recording missing in
2 | dev shrink notes.txt --output x.session.zst -- false | notes.txt: this is not a recording: it h
1 | dev shrink a.session.zst --output x.session.zst -- true | the command does not fail on the log
2 | dev shrink a.session.zst --output a.session.zst -- false | a.session.zst: it exists:
2 | dev shrink a.session.zst --output x.session.zst -- nosuchcommand {} | nosuchcommand: No such f
2 | dev shrink a.session.zst --output nowhere/x.session.zst -- false | nowhere/x.session.zst: ther
2 | dev shrink damaged.session.zst --output x.session.zst -- false | `antiphon recordings recover`
2 | dev shrink empty --output x.session.zst -- false | empty: it has no recordings, and one is nee
2 | dev bench engine --sessions 0 | Invalid value for '--sessions': numbers from 1 to 64 with comm
2 | dev bench engine --sesions 1 | No such option '--sesions'. (Did you mean one of: '--json', '--
2 | dev bench engine --seconds x | Invalid value for '--seconds': 'x' is not a valid whole number.
2 | dev bench engine --jsn | No such option '--jsn'. Did you mean '--json'?
2 | dev bench engine --device x | Invalid value for '--device': 'x' is not one of 'cpu', 'cuda'
2 | dev bench engine --seconds 0 | Invalid value for '--seconds': 0 is not in the range 1<=x<=90.
2 | dev bench --jsn | No such option '--jsn'.
2 | dev bench tiny | No such command 'tiny'.
1 | dev bench engine --model nothing --sessions 1 | unknown model 'nothing': choose from tiny, scr
2 | dev bench engine extra | Got unexpected extra argument (extra); a model is named with --model
2 | tlak a.wav | No such command 'tlak'. Did you mean 'talk'?
2 | serv | No such command 'serv'. Did you mean 'serve'?
2 | help | No such command 'help'. Did you mean: antiphon --help?
2 | list | No such command 'list'. Did you mean: antiphon recordings list, antiphon workers list?
2 | start | No such command 'start'. Did you mean: antiphon workers start?
"""
TABLE: Final = [
    (int(code), line, words)
    for code, line, words in (row.split(" | ", 2) for row in ROWS.strip().splitlines())
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user who is about to make a mistake."""
    made = tmp_path_factory.mktemp("mistakes")
    for name, log in (
        ("a", "realtime-video"),
        ("chat", "realtime-chat"),
        ("damaged", "damaged-payload"),
    ):
        shutil.copy(FOLDER / f"v1-{log}.session.zst", made / f"{name}.session.zst")
    shutil.copy(SPEECH / "demo.wav", made / "a.wav")
    shutil.copy(SPEECH / "frame.jpg", made / "a.jpg")
    for name, text in (
        *(("notes.txt", "hello"), ("notes.wav", "hello"), ("empty.wav", "")),
        *(("bad.toml", 'port = "x"\n'), ("typo.toml", "prot = 1\n"), ("broken.toml", "port = \n")),
    ):
        (made / name).write_text(text)
    (made / "empty").mkdir()
    (made / "recordings").mkdir()
    return made


def command_of(line: str) -> str:
    """The command of a line: its first word, or two where that is a group."""
    words = line.split()
    return " ".join(words[: 2 if words[0] in WITHIN else 1])


@pytest.mark.parametrize(("code", "line", "words"), TABLE, ids=[row[1] for row in TABLE])
def test_a_mistake_is_answered_in_a_line(
    code: int, line: str, words: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new user gets a traceback, or a fact without what is wrong in it."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("ANTIPHON_RECORD_TO", "recordings")
    told = CliRunner().invoke(main, shlex.split(line))
    assert isinstance(told.exception, SystemExit), told.exception
    assert told.exit_code == code
    assert words in told.output
    lines = [it for it in told.stderr.splitlines() if not it.startswith(("Usage: ", "Try '"))]
    errors = [it for it in lines if it.startswith("Error: ")]
    assert len(errors) <= 1
    assert errors or lines or command_of(line) in ON_STDOUT
    assert "Traceback" not in told.output
    assert "Error: Error" not in told.output


def test_each_command_has_its_mistakes() -> None:
    """A new command would be tried by its author only."""
    counts = Counter(command_of(line) for _, line, _ in TABLE)
    commands = {name for group in GROUPS.values() for name in group} - WITHIN.keys()
    commands |= {f"{group} {name}" for group, table in WITHIN.items() for name in table}
    commands |= {"keys add", "keys list", "keys remove", "keys renew"}
    assert {name: counts[name] for name in commands if counts[name] < MISTAKES_MIN} == {}
