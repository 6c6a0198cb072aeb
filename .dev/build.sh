# Configuring and compiling.

readonly GIB_PER_COMPILER=3

cmake_arguments() {
  printf '%s\n' -G Ninja "-DLOCKSTEP_TORCH=$TORCH"
  # CMake reads CXX itself, which may include a launcher: CXX="ccache g++".
  [[ ${CXX:-} || $COMPILER == g++ || $* == *-DCMAKE_CXX_COMPILER=* ]] || printf '%s\n' "-DCMAKE_CXX_COMPILER=$COMPILER"
  ((!OFFLINE)) || printf '%s\n' -DLOCKSTEP_OFFLINE=ON "-DCMAKE_PREFIX_PATH=$PWD/.pack"
  printf '%s\n' "$@"
}

# configured DIR CMAKE-ARGUMENT...: true if DIR was last configured with these arguments.
configured() {
  local arguments
  mapfile -t arguments < <(cmake_arguments "${@:2}")
  [[ -f $1/build.ninja && $(cat "$1/.configured" 2>/dev/null) == "${CXX:-} ${arguments[*]}" ]]
}

# configure DIR CMAKE-ARGUMENT...: needed for new arguments only, because Ninja re-runs CMake when a CMake file changes.
configure() {
  local dir=$1 arguments
  ! configured "$@" || return 0
  mapfile -t arguments < <(cmake_arguments "${@:2}")
  # CMake caches where it found each library, which is wrong with other arguments. Objects stay: Ninja recompiles only
  # those whose command line changes.
  rm -rf "$dir"/CMakeCache.txt "$dir"/CMakeFiles/[0-9]* "$dir"/.configured
  step "Configuring $dir" cmake -S . -B "$dir" "${arguments[@]}" || explain "CMake could not configure $dir"
  printf '%s\n' "${CXX:-} ${arguments[*]}" >"$dir/.configured"
}

# jobs_that_fit WANTED GIB: how many of WANTED jobs fit into memory if each takes GIB, but at least one.
jobs_that_fit() {
  local fit
  fit=$(awk -v each="$2" '/^MemAvailable/ { print int($2 / 1048576 / each) }' /proc/meminfo)
  echo $((fit < 1 ? 1 : fit < $1 ? fit : $1))
}

# One compiler per processor, and no more than the memory holds.
compile_jobs() { echo "${LOCKSTEP_JOBS:-$(jobs_that_fit "$(nproc)" "$GIB_PER_COMPILER")}"; }

# compile DIR [--target NAME...]
compile() {
  local dir=$1
  shift
  NINJA_STATUS='[%f/%t] ' PROGRESS=objects step "Building $dir" cmake --build "$dir" -j "$(compile_jobs)" "$@" ||
    explain "building $dir failed"
  { grep -E ' warning: ' "$LOG" | sort -u | head -n 20; } || true
}

readonly EVERYTHING=(-DCMAKE_BUILD_TYPE=Release)

# build_part TARGETS CMAKE-ARGUMENT...: does not reconfigure a build/ that was configured for everything.
build_part() {
  local targets
  read -ra targets <<<"$1"
  configured build "${EVERYTHING[@]}" || configure build "${EVERYTHING[@]}" "${@:2}"
  compile build --target "${targets[@]}"
}

build() {
  need_space build "$BUILD_MB"
  setup_packages "${TEST_LIBRARIES[@]}" "${BENCH_LIBRARIES[@]}" "${MPI_LIBRARIES[@]}"
  setup_torch
  setup_digits
  build_everything
}

build_everything() {
  configure build "${EVERYTHING[@]}"
  compile build
}

# Builds what the tests run, including the benchmarks that tests start.
build_tests() {
  configure build "${EVERYTHING[@]}"
  compile build --target {lockstep,cli,python,examples,tests}/all bench/{collectives,data_parallel}/all benched
}
