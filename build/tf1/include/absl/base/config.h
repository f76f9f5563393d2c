// TensorFlow 1.15 is compiled as C++11, where absl::string_view, optional, any and variant are classes of absl. As
// C++17 this absl would make them aliases of std's, and no symbol that mentions one would be found in TensorFlow's
// libraries.
#pragma once
#include_next <absl/base/config.h>
#undef ABSL_HAVE_STD_STRING_VIEW
#undef ABSL_HAVE_STD_OPTIONAL
#undef ABSL_HAVE_STD_ANY
#undef ABSL_HAVE_STD_VARIANT
