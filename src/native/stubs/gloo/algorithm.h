// Stub: ProcessGroupGloo.hpp includes it and names nothing from it.
#pragma once
