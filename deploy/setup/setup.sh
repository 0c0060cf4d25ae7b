#!/usr/bin/env bash
# Finds a Python that Concord runs on and lets it set the checkout up. PYTHON=... names another one.
set -euo pipefail

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

for python in ${PYTHON:-python3 python3.12 python3.11}; do
    if fits "$python"; then
        exec "$python" "$(dirname "$0")/environment.py"
    fi
done
echo "set-up: got ${PYTHON:-python3} = $("${PYTHON:-python3}" --version 2>&1 || true); expected Python 3.11 or 3.12." >&2
echo "        Install it (Debian: apt-get install python3.11 python3.11-venv) or name it: make PYTHON=/path/to/python3.11 ..." >&2
exit 1
