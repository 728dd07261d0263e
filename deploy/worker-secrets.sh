#!/bin/sh
# The secrets of workers and their gateways, made with openssl in a new folder:
#
#     sh deploy/worker-secrets.sh FOLDER NAME...
#
# NAMEs are the host names or IP addresses by which gateways reach the workers. The folder gets
#   token             for workers and gateways
#   ca.crt            for gateways: the authority that they trust for workers, and for nothing else
#   tls.crt, tls.key  for workers: one certificate for all names
#   ca.key            for no machine of these: only to make another certificate
set -eu

if [ $# -lt 2 ]; then
    echo "usage: sh worker-secrets.sh FOLDER NAME..." >&2
    exit 2
fi
folder=$1
shift
names=
for name in "$@"; do
    case $name in
        *:*) kind=IP ;;
        *[!0-9.]*) kind=DNS ;;
        *) kind=IP ;;
    esac
    names=$names${names:+,}$kind:$name
done

umask 077
# A folder that exists may hold secrets that are in use.
mkdir "$folder"
cd "$folder"
openssl rand -hex 32 > token
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 3650 \
    -subj "/CN=Antiphon workers" -addext keyUsage=critical,keyCertSign,cRLSign \
    -keyout ca.key -out ca.crt 2> /dev/null
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 3650 \
    -subj "/CN=Antiphon worker" -CA ca.crt -CAkey ca.key \
    -addext basicConstraints=critical,CA:false -addext extendedKeyUsage=serverAuth \
    -addext "subjectAltName=$names" -keyout tls.key -out tls.crt 2> /dev/null
echo "made $folder for $names"
