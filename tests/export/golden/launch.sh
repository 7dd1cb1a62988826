#!/usr/bin/env bash
# Rents what the plan says, then serves it from here, with the models' tokenizers and keys.jsonl that lie here.
# Ends nothing: `sky down chat-0-us-east-1-0-box0 chat-0-us-east-1-0-box1 chat-0-us-east-1-0-box2` does.
set -euo pipefail
: "${POTLUCK_API_KEY:?the key that engines and gateway share}"
for box in chat-0-us-east-1-0-box0 chat-0-us-east-1-0-box1 chat-0-us-east-1-0-box2; do sky launch --yes --detach-run --secret POTLUCK_API_KEY --cluster "$box" "$box.yaml" & done
wait
cp engines.yaml.in engines.yaml
for box in chat-0-us-east-1-0-box0 chat-0-us-east-1-0-box1 chat-0-us-east-1-0-box2; do sed -i "s/@$box@/$(sky status --ip "$box")/" engines.yaml; done
umask 077; printf %s "$POTLUCK_API_KEY" > engine.key
exec potluck serve plan.json potluck.yaml --engines engines.yaml --files=chat=/models/chat --files=documents=/models/documents --host 0.0.0.0 --keys keys.jsonl "$@"
