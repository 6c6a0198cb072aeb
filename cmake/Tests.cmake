# How tests are declared, and what each suite may take.
set(results ${PROJECT_BINARY_DIR}/test-results)
file(MAKE_DIRECTORY ${results})

# lockstep_test(NAME COMMAND program|path argument...   or   SCRIPT file argument... [PYTHON interpreter]
#               [TIMEOUT seconds] [LABELS ...] [ENVIRONMENT ...] [LOCKS ...] [ALONE]
#               [PASS regex] [SKIP regex] [DEPENDS ...])
#
# Runs the command, or Python with the script, under test_session. Exit status 77 means skipped, and so does output
# that matches SKIP. LOCKS names what two tests must not use at once: namespaces, slurm. ALONE is for tests that
# measure: nothing else runs beside them. Rank 0's GoogleTest results go to test-results/NAME.json.
function(lockstep_test name)
  cmake_parse_arguments(arg "ALONE" "TIMEOUT;PASS;SKIP;PYTHON" "COMMAND;SCRIPT;LABELS;ENVIRONMENT;LOCKS;DEPENDS" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "lockstep_test(${name}): unexpected ${arg_UNPARSED_ARGUMENTS}")
  endif()
  set(command ${arg_COMMAND})
  set(environment ${arg_ENVIRONMENT})
  set(fail "test_session: the test took longer")
  if(arg_SCRIPT)
    set(command ${arg_PYTHON} -B ${arg_SCRIPT})
    if(NOT arg_PYTHON)
      set(command ${Python3_EXECUTABLE} ${command})
    endif()
  else()
    list(APPEND environment OMP_NUM_THREADS=1 GTEST_COLOR=no GTEST_OUTPUT=json:${results}/${name}.json)
    string(APPEND fail "|rank [0-9]+ failed:|\\[  FAILED  \\]")
  endif()
  list(POP_FRONT command program)
  if(TARGET ${program})
    set(program $<TARGET_FILE:${program}>)
  endif()
  # A test ends by itself: the limit only ends one that hangs, so it leaves room for a busy machine.
  set(timeout 600)
  if(arg_TIMEOUT)
    set(timeout ${arg_TIMEOUT})
  endif()
  if(LOCKSTEP_SANITIZE)
    math(EXPR timeout "3 * ${timeout}")
  endif()
  if(LOCKSTEP_SANITIZE MATCHES thread)  # which would wait a second at the end of every process
    list(APPEND environment TSAN_OPTIONS=atexit_sleep_ms=0:die_after_fork=0)
  endif()
  add_test(NAME ${name} COMMAND $<TARGET_FILE:test_session> --limit ${timeout} ${program} ${command})
  math(EXPR backstop "${timeout} + 60")
  set_tests_properties(${name} PROPERTIES
    TIMEOUT ${backstop} SKIP_RETURN_CODE 77 LABELS "${arg_LABELS}" ENVIRONMENT "${environment}"
    FAIL_REGULAR_EXPRESSION "${fail}")
  if(arg_ALONE)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  endif()
  foreach(option LOCKS:RESOURCE_LOCK PASS:PASS_REGULAR_EXPRESSION SKIP:SKIP_REGULAR_EXPRESSION DEPENDS:DEPENDS)
    string(REPLACE ":" ";" option ${option})
    list(GET option 0 argument)
    list(GET option 1 property)
    if(arg_${argument})
      set_tests_properties(${name} PROPERTIES ${property} "${arg_${argument}}")
    endif()
  endforeach()
endfunction()

# lockstep_skipped_test(NAME REASON): a test that cannot run here.
function(lockstep_skipped_test name reason)
  lockstep_test(${name} COMMAND ${CMAKE_COMMAND} -E echo "skipped: ${reason}" SKIP "^skipped: ")
endfunction()

# lockstep_budget(PREFIX SECONDS): tests whose names begin with PREFIX should take this long together, on 2 quiet
# cores and summed over tests that ran side by side. ./dev test prints each budget beside the time that was used.
set(budgets "")
macro(lockstep_budget prefix seconds)
  string(APPEND budgets "${prefix} ${seconds}\n")
endmacro()
