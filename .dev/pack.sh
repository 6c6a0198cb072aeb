# ./dev pack: creates the pack that --offline builds from.

# Lists the files of installed packages that a build needs. The other machine must have the C and C++ runtimes.
packed_files() {
  local arch=$1 listed library
  listed=$(dpkg -L "${LIBRARIES[@]}" "${TEST_LIBRARIES[@]}" "${BENCH_LIBRARIES[@]}")
  grep -E "^/usr/(include|share/cmake|lib/$arch/cmake)/|^/usr/lib/$arch/[^/]*\.a$" <<<"$listed"
  grep "^/usr/lib/$arch/[^/]*\.so$" <<<"$listed" | while read -r library; do
    printf '%s\n' "$library"*
    ldd "$library" | awk '$2 == "=>" && $1 !~ /^lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so/ { print $3 }'
  done
}

pack() {
  local new=build/pack.new arch ninja kib compiler
  ((!OFFLINE)) || die "pack collects what apt-get installed: run it without --offline."
  setup_packages "${TEST_LIBRARIES[@]}" "${BENCH_LIBRARIES[@]}"
  setup_digits
  read -ra compiler <<<"$COMPILER"
  arch=$("${compiler[@]}" -print-multiarch)
  rm -rf "$new"
  mkdir -p "$new/bin"
  # Links are followed, because copying a pack may drop them.
  packed_files "$arch" | sort -u | tar -cPh --hard-dereference --no-recursion -T - \
    --transform "s|^/usr/|/|;s|^/||;s|/$arch/|/|;s|/$arch\$||" | tar -x -C "$new"
  # Without the folder named after the architecture, these files are one level closer to the prefix.
  sed -i -E -e "s|/lib/$arch/|/lib/|g" "$new"/lib/cmake/*/*Targets*.cmake \
    -e 's|^get_filename_component\((_IMPORT_PREFIX "\$\{CMAKE_CURRENT_LIST_FILE\}") PATH\)|set(\1)|'
  # A shim in PATH would not work on another machine, so this finds the program itself.
  ninja=$({ type -ap ninja; python3 -c 'import ninja; print(ninja.BIN_DIR + "/ninja")' 2>/dev/null; } |
    xargs -r grep -la $'^\x7fELF' | head -n 1) || true
  [[ $ninja ]] || die "cannot find a ninja program to pack, only shims: install the package ninja-build."
  cp -L "$ninja" "$new/bin/ninja"
  cp -r build/digits "$new/"
  kib=$(du -sk "$new" | cut -f1)
  ((kib < PACK_LIMIT_MIB * 1024)) || die "the pack takes $((kib / 1024)) MiB, $PACK_LIMIT_MIB or more."
  rm -rf .pack
  mv "$new" .pack
  echo ".pack holds $(find .pack -type f | wc -l) files, $kib KiB"
}
