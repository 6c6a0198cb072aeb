// LibTorch ships ProcessGroupGloo.hpp and Gloo's symbols, but not Gloo's headers. The files in this folder
// declare only what that header names. Gloo's objects are used only through pointers, so no layout is
// assumed.
#pragma once
