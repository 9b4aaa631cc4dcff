#!/usr/bin/env bash
# Two more clients of a live server: the `llm` command and langchain-openai, from the package index, in an environment
# of their own. Each asks in one piece and streamed, and goes on with the conversation; all have to hear the same.
# Run it where `octavo` is on the PATH:
#
#     tests/server/smoke_clients.sh [MODEL]
set -euo pipefail

folder=$(mktemp -d)
trap 'kill "${server:-}" 2>/dev/null || true; rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llm langchain-openai

octavo serve ${1+"$1"} --port 0 --served-model-name smoke --quiet > "$folder/url" &
server=$!
until [ -s "$folder/url" ]; do
    kill -0 "$server"
    sleep 0.1
done
url=$(cat "$folder/url")

export LLM_USER_PATH=$folder/llm
mkdir "$LLM_USER_PATH"
cat > "$LLM_USER_PATH/extra-openai-models.yaml" << YAML
- model_id: octavo
  model_name: smoke
  api_base: $url/v1
YAML

ask=("$folder/venv/bin/llm" -m octavo -o temperature 0 -o max_tokens 24)
"${ask[@]}" --no-stream "Name three rivers." > "$folder/llm-whole"
"${ask[@]}" "Name three rivers." > "$folder/llm-streamed"
"${ask[@]}" -c "And three lakes." > "$folder/llm-second"

"$folder/venv/bin/python" - "$url" "$folder" << 'PYTHON'
import sys
from pathlib import Path

from langchain_openai import ChatOpenAI

url, folder = sys.argv[1], Path(sys.argv[2])
chat = ChatOpenAI(model="smoke", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=24)
turns = [("user", "Name three rivers.")]
whole = chat.invoke(turns).content
streamed = "".join(chunk.content for chunk in chat.stream(turns))
second = chat.invoke([*turns, ("assistant", whole), ("user", "And three lakes.")]).content
heard = {name: (folder / f"llm-{name}").read_text().strip() for name in ("whole", "streamed", "second")}
print(f"{whole!r}\n{second!r}")
assert whole and whole == streamed
assert heard == {"whole": whole.strip(), "streamed": whole.strip(), "second": second.strip()}, heard
PYTHON
echo "llm and langchain-openai hear the same"
