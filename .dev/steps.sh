# Runs one step: its progress, its log, and its error message.

readonly REPORT_SECONDS=30 # how often a log file gets a line of progress; a terminal is updated every second

TIMES=() PART='' PART_BEGIN=0 GROUP=''

# timed NAME COMMAND...: the last line of output states how long each part took, also the part that failed.
timed() {
  PART=$1 PART_BEGIN=$SECONDS
  "${@:2}"
  end_part
}

end_part() {
  [[ ! $PART ]] || TIMES+=("$PART $((SECONDS - PART_BEGIN)) s")
  PART=''
}

# only_one: waits for another call of this script in the same tree. Two of them would write the same files.
only_one() {
  exec 9<.
  flock -n 9 2>/dev/null || {
    echo "dev: another ./dev is running in $PWD; waiting until it ends" >&2
    flock 9
  }
}

# in_group COMMAND...: runs the command in a process group of its own and waits for it. Bash handles a signal at once
# while it waits, and only after the command while the command is in the foreground.
in_group() {
  local status=0
  set -m
  "$@" 9<&- &
  GROUP=$!
  set +m
  wait "$GROUP" || status=$?
  GROUP=''
  return "$status"
}

die() {
  printf 'dev: %s\n' "$*" >&2
  exit 1
}

misuse() { (die "$@") || exit 2; }

no_arguments() { (($# == 1)) || misuse "'$1' takes no arguments, got: ${*:2}"; }

# step HEADING COMMAND...: writes the command's output to $LOG and shows it only if the command fails. $PROGRESS
# names a function that prints one line of progress; it is called with the seconds so far.
step() {
  local heading=$1 begin=$SECONDS status=0 watcher
  shift
  printf '==> %s\n' "$heading"
  watch $$ "${PROGRESS:-last_line}" 9<&- &
  watcher=$!
  in_group into_log "$@" || status=$?
  kill "$watcher" 2>/dev/null || true
  wait "$watcher" 2>/dev/null || true
  [[ ! -t 1 ]] || printf '\r\e[K'
  if ((status == 0)); then
    printf '    %d s\n' $((SECONDS - begin))
  else
    printf '    failed after %d s\n' $((SECONDS - begin))
    { grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking)' "$LOG" | tail -n 400 >&2; } || true
  fi
  return "$status"
}

into_log() { "$@" >"$LOG" 2>&1 </dev/null; }

# watch PARENT FUNCTION: reports progress until it is killed or the parent is gone.
watch() {
  local begin=$SECONDS next=$REPORT_SECONDS line width
  width=$(tput cols 2>/dev/null || echo 80)
  while sleep 1 >/dev/null 2>&1 && kill -0 "$1" 2>/dev/null; do
    if [[ -t 1 ]]; then
      line=$("$2" $((SECONDS - begin)))
      printf '\r    %s\e[K' "${line:0:width-6}"
    elif ((SECONDS - begin >= next)); then
      printf '    %s\n' "$("$2" $((SECONDS - begin)))"
      next=$((SECONDS - begin + REPORT_SECONDS))
    fi
  done
}

last_line() { printf '%d s: %s' "$1" "$(tail -n 1 "$LOG" | tr -d '\r' | cut -c 1-100)"; }

# The estimate assumes that the remaining objects take as long as the finished ones. The first ones take longest
# (precompiled headers, the library), so there is no estimate before a fifth of them is finished.
objects() {
  local finished total
  read -r finished total < <(grep -oE '^\[[0-9]+/[0-9]+\]' "$LOG" | tail -n 1 | tr -c '0-9\n' ' ') || true
  if ((${finished:-0} == 0)); then
    printf '%d s' "$1"
  elif ((finished * 5 < total)); then
    printf '%d of %d objects, %d s' "$finished" "$total" "$1"
  else
    printf '%d of %d objects, %d s, about %d s left' "$finished" "$total" "$1" $(($1 * (total - finished) / finished))
  fi
}

# downloads: pip prints nothing while it downloads, but the file grows in the folder it was given.
downloads() { printf '%d s, %d MB downloaded: %s' "$1" "$(du -sm "$SCRATCH" | cut -f 1)" "$(tail -n 1 "$LOG" | cut -c 1-80)"; }

# explain WHAT: ends the script, after a failed step, with the cause that its log shows.
explain() {
  local again="Run the same command again to continue where it stopped." causes
  # Without the lines of source that a compiler quotes, which may contain any of these words.
  causes=$(grep -vE '^ *[0-9]* +\|' "$LOG" || true)
  if grep -qE 'No space left on device|Disk quota exceeded|enough free space' <<<"$causes"; then
    die "$1: the disk is full ($(free_mb .) MB free in $PWD, $(free_mb "$SCRATCH") MB in ${SCRATCH%/*}, $(free_mb /var) MB in /var). Free some space. $again"
  elif grep -qE 'Killed signal terminated program|fatal error: Killed|internal compiler error: Killed|terminated with signal 9|^(/[^ ]*: line [0-9]+: *)?[0-9]* *Killed|(out of|exhausted:) memory|virtual memory exhausted' <<<"$causes"; then
    die "$1: memory ran out and the compiler was killed. Run the same command again with LOCKSTEP_JOBS=1; it continues where it stopped."
  elif grep -qE '^E: (Could not get lock|Unable to (acquire|lock))|locked by another process' <<<"$causes"; then
    die "$1: another program is installing packages. Wait until it is done. $again"
  elif grep -qE 'Temporary failure (in name resolution|resolving)|Could not resolve|Failed to (fetch|establish)|Connection (timed out|refused|reset|broken)|[Cc]ould not connect to|Network is unreachable|Max retries|[Rr]ead timed out|IncompleteRead|Name or service not known|ConnectionError|incomplete-download|DO NOT MATCH THE HASHES' <<<"$causes"; then
    die "$1: the network failed or the download was interrupted. Check the network. $again
Without a network, use --offline with a .pack/ made by './dev pack' on another machine."
  elif grep -q '^ninja: build stopped: interrupted by user' <<<"$causes"; then
    die "$1: something interrupted it. $again"
  fi
  die "$1; see the first error above."
}

free_mb() { df -Pm "$1" | awk 'NR == 2 { print $4 }'; }

# need_space VERB MB: MB is what .venv/ and build/ take when the verb is done, without CUDA.
need_space() {
  local free needed=$2 used=0
  free=$(free_mb .)
  ((free < needed + CUDA_MB)) || return 0
  ! torch_has_cuda || needed=$((needed + CUDA_MB))
  used=$({ du -scm .venv/ build 2>/dev/null || true; } | tail -n 1 | cut -f 1)
  ((free + used >= needed)) ||
    die "'$1' needs about $needed MB in $PWD, and $((free + used)) MB are free or used by it already. Free some space and run it again."
}

finish() {
  end_part
  ((${#TIMES[@]} == 0)) || printf 'time: %s\n' "$(printf '%s, ' "${TIMES[@]}" | sed 's/, $//')"
  rm -rf "$SCRATCH"
}

interrupted() {
  trap '' INT TERM HUP
  # Like Ctrl-C, so that apt-get, pip, Ninja and CTest can clean up.
  [[ ! $GROUP ]] || { kill -INT -- "-$GROUP" && wait "$GROUP"; } 2>/dev/null || true
  jobs -p | xargs -r kill 2>/dev/null || true
  [[ ! -t 1 ]] || printf '\r\e[K'
  printf 'dev: interrupted; run the same command again to continue where it stopped\n' >&2
  exit 130
}
