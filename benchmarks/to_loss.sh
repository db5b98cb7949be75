#!/usr/bin/env bash
# Time to a validation loss on slow links: a transformer on text, LeNet on digits, a recommender on clicks, 3 seeds each,
# 4 machines at 100 Mbit/s; and LeNet with workers that stall, for bounded staleness. Every part ends by itself, and goes
# on where it was interrupted if the script is started again.
#   to_loss.sh [text|digits|clicks|stalls ...] [-- further options of `poseidon bench`]
set -euo pipefail
source "$(dirname "$0")/common.sh"
models=(text digits clicks stalls)
read_arguments "$@"
failed=0
lockstep=ddp,ddp-powersgd,poseidon,lowrank,local  # ssp trains in real time, at the speed of the link: see stalls
part() {  # name, time limit in seconds, options
    local name=$1 limit=$2
    shift 2
    timeout --kill-after=30 "$limit" "$PYTHON" -m poseidon.cli bench "$@" \
        --output "$results/to_loss_$name.json" "${options[@]}" || {
        echo "to_loss $name ended with status $?" >&2
        failed=1
    }
}
for model in "${models[@]}"; do
    case $model in
        text) part text 5400 --to-loss text --more 3 ;;
        digits) part digits 1800 --to-loss digits --paced 5:10 --dilate 6 --against "$lockstep" ;;
        clicks) part clicks 3600 --to-loss clicks --against "$lockstep" ;;
        stalls) part stalls 1800 --to-loss digits --rate 1gbit --stalls 0.2:3 --every 5 \
            --against ddp,poseidon-distribute,ssp:staleness=0,ssp:staleness=8,ssp ;;
        *) echo "to_loss.sh: $model is none of text, digits, clicks, stalls" >&2; exit 2 ;;
    esac
done
exit $failed
