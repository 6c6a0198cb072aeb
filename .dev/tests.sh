# ./dev test, format and check.

readonly GIB_PER_TEST=2 # up to 8 ranks

# Tests mostly wait, so one more job than there are processors keeps those busy.
test_jobs() { echo "${LOCKSTEP_TEST_JOBS:-$(jobs_that_fit $(($(nproc) + 1)) "$GIB_PER_TEST")}"; }

setup_tests() {
  local browser=
  need_space test "$TEST_MB"
  if ((!OFFLINE)) && ! has_browser; then
    fetch_package_lists
    browser=$(browser_package)
  fi
  setup_packages "${TEST_LIBRARIES[@]}" "${BENCH_LIBRARIES[@]}" "${MPI_LIBRARIES[@]}" "${RUNTIMES[@]}" $browser
  setup_torch safetensors tensorboard
  setup_digits
}

# With arguments, runs only the tests that they select for ctest; without, also checks the format and AddressSanitizer.
run_tests() {
  if (($#)); then
    setup_tests
    build_tests
    run_ctest "$@"
    return
  fi
  setup_tests
  if ((OFFLINE)) && ! setup_clang_format; then
    echo "format: not checked; --offline installs nothing, and clang-format $CLANG_FORMAT_PIN is missing"
  else
    timed format format --check
  fi
  timed build build_tests
  timed tests run_ctest
  timed asan sanitize asan address,undefined plain '-O0 -g1'
}

run_ctest() {
  local status=0 results=build/test-results last=build/.test-seconds begin=$SECONDS
  printf '==> Testing%s\n' "$( (($#)) || [[ ! -s $last ]] || printf ' (the last run took %d s)' "$(<"$last")")"
  rm -rf "$results"
  mkdir -p "$results"
  # The reasons for skips are in the programs' output, which ctest would cut off after 1 KiB.
  # For a program that fails, the many cases that passed are omitted.
  # sed stays until ctest ends: without a reader, an interrupted ctest would die before its tests.
  in_group show_ctest --test-dir build --output-on-failure --no-tests=error --test-output-size-passed 10000000 \
    --output-junit "$PWD/$results/ctest.xml" -j "$(test_jobs)" "$@" || status=$?
  [[ ! -f $results/ctest.xml ]] || python3 -B .dev/summary.py "$results" build/test-budgets.txt || true
  (($#)) || echo $((SECONDS - begin)) >"$last"
  return "$status"
}

show_ctest() {
  ctest "$@" </dev/null | (trap '' INT TERM && exec sed -uE '/^\[ (RUN     |      OK) \] |^\[-{10}\] [0-9]/d') ||
    return "${PIPESTATUS[0]}"
}

write_docs() {
  compgen -G 'build/test-results/*.json' >/dev/null || die "no test results: run './dev test' first."
  python3 tests/docs/conformance_table.py write build/test-results docs/evidence/conformance.md
  ! compgen -G 'build/test-results/faults*.json' >/dev/null ||
    python3 -B tests/docs/faults_table.py write build/test-results/faults*.json docs/evidence/faults.md
}

format() {
  local check=$# files wrong failed=0
  [[ $* == "" || $* == --check ]] || misuse "format: expected nothing or --check, got: $*"
  setup_clang_format || die "--offline installs nothing, and clang-format $CLANG_FORMAT_PIN is missing."
  # Without git, which an unpacked archive or a container may not have.
  mapfile -t files < <(find lockstep cli tests examples bench cmake fuzz python -path python/build -prune -o \
    -type f -regex '.*\.\(h\|cpp\|cu\|cuh\)' -print | sort)
  if ((!check)); then
    printf '%s\0' "${files[@]}" | xargs -0 -n 16 -P "$(nproc)" "$CLANG_FORMAT" -i
    return
  fi
  printf '%s\0' "${files[@]}" | xargs -0 -n 16 -P "$(nproc)" "$CLANG_FORMAT" --dry-run -Werror >"$LOG" 2>&1 || failed=1
  wrong=$(sed -nE 's/^([^: ]+):[0-9]+:[0-9]+: error: .*/  \1/p' "$LOG" | sort -u)
  [[ $wrong ]] || ((!failed)) || die "$CLANG_FORMAT failed: $(tail -n 3 "$LOG")"
  [[ ! $wrong ]] || die "$(wc -l <<<"$wrong") of ${#files[@]} files are not formatted; './dev format' would change:
$wrong"
  echo "${#files[@]} files are formatted."
}

# sanitize NAME SANITIZERS LABEL FLAGS. With AddressSanitizer and UBSan, compiling takes two to three times as long
# at -O1 as at -O0, which is more than the tests gain; under ThreadSanitizer the tests are what takes long.
sanitize() {
  local dir=build/check/$1
  configure "$dir" -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=$4 -DNDEBUG" "-DLOCKSTEP_SANITIZE=$2"
  compile "$dir" --target lockstep_plain_tests
  printf '==> Testing under %s\n' "$2"
  ctest --test-dir "$dir" --output-on-failure --no-tests=error -j "$(test_jobs)" -L "$3" ||
    die "the tests labelled '$3' failed under $2."
}

# Each target starts with its corpus and the inputs it found here before. libFuzzer reports an input that ends the
# program, and keeps it.
fuzz() {
  local dir=build/check/fuzz corpus name
  setup_clang
  configure "$dir" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLOCKSTEP_FUZZ=ON "-DCMAKE_CXX_COMPILER=clang++-$CLANG_MAJOR"
  compile "$dir" --target lockstep_fuzz
  for corpus in fuzz/corpus/*/; do
    name=$(basename "$corpus")
    mkdir -p "$dir/corpus/$name"
    cp "$corpus"* "$dir/corpus/$name"
    step "Fuzzing $name" "$dir/bin/fuzz_$name" -max_total_time="$FUZZ_SECONDS" -timeout=5 -rss_limit_mb=2048 \
      -verbosity=0 -artifact_prefix="$dir/$name-" "$dir/corpus/$name" ||
      die "fuzzing $name failed; the input is the newest $dir/$name-*: run $dir/bin/fuzz_$name on it to reproduce."
  done
}

# Batches of sources hide a missing #include, and single sources hide names that clash in a batch. Each installed
# header must compile alone.
warnings() {
  configure build/check/werror -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_WERROR=ON -DLOCKSTEP_UNITY=ON
  compile build/check/werror
  configure build/check/werror-single-sources -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_WERROR=ON -DLOCKSTEP_UNITY=OFF
  compile build/check/werror-single-sources
  compile build/check/werror-single-sources --target installed_headers
}

check() {
  local part parts=("$@")
  ((${#parts[@]})) || parts=(format warnings asan tsan fuzz)
  for part in "${parts[@]}"; do
    [[ $part =~ ^(format|warnings|asan|tsan|fuzz)$ ]] ||
      misuse "check: unknown part '$part'; the parts are: format warnings asan tsan fuzz"
  done
  [[ ${parts[*]} == format ]] || setup_tests
  for part in "${parts[@]}"; do
    case $part in
      format) format --check ;;
      asan) sanitize asan address,undefined plain '-O0 -g1' ;;
      tsan) sanitize tsan thread threads '-O1 -g1' ;;
      *) "$part" ;;
    esac
  done
}
