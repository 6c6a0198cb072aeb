// LibTorch ships ProcessGroupGloo.hpp and Gloo's symbols, not Gloo's headers. The files of this folder
// declare what that header names and no more; to us Gloo's objects are pointers, so no layout is assumed.
#pragma once
