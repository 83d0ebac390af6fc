// Stub: ProcessGroupGloo.hpp includes this header but uses nothing from it.
#pragma once
