# Functions that declare tests and the time budgets of suites.
set(results ${PROJECT_BINARY_DIR}/test-results)
file(MAKE_DIRECTORY ${results})

# lockstep_test(NAME COMMAND program|path argument...   or   SCRIPT file argument... [PYTHON interpreter]
#               [TIMEOUT seconds] [LABELS ...] [ENVIRONMENT ...] [LOCKS ...] [ALONE]
#               [PASS regex] [SKIP regex] [DEPENDS ...])
#
# Runs the command, or Python with the script, under test_session. Exit status 77 means skipped, and so does
# output that matches SKIP. LOCKS names resources that two tests must not use at once: namespaces, slurm.
# ALONE is for tests that measure: no other test runs at the same time. Rank 0's GoogleTest results are
# written to test-results/NAME.json.
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
  # Tests end by themselves. The limit only stops one that hangs, so it leaves room for a busy machine.
  set(timeout 600)
  if(arg_TIMEOUT)
    set(timeout ${arg_TIMEOUT})
  endif()
  if(LOCKSTEP_SANITIZE)
    math(EXPR timeout "3 * ${timeout}")
  endif()
  if(LOCKSTEP_SANITIZE MATCHES thread)  # Otherwise every process would wait a second at exit.
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

# lockstep_skipped_test(NAME REASON): declares a test that cannot run here.
function(lockstep_skipped_test name reason)
  lockstep_test(${name} COMMAND ${CMAKE_COMMAND} -E echo "skipped: ${reason}" SKIP "^skipped: ")
endfunction()

# lockstep_budget(PREFIX SECONDS): sets the expected total time of the tests whose names begin with PREFIX, on
# 2 idle cores, summed over tests that ran in parallel. ./dev test prints each budget next to the time used.
set(budgets "")
macro(lockstep_budget prefix seconds)
  string(APPEND budgets "${prefix} ${seconds}\n")
endmacro()
