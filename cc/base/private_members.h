// Members that a class of TensorFlow's does not show.
#ifndef STARWIRE_CC_BASE_PRIVATE_MEMBERS_H_
#define STARWIRE_CC_BASE_PRIVATE_MEMBERS_H_

namespace starwire {
// An explicit instantiation must be in its template's namespace, and is one of each source file that needs it.
namespace {

// An explicit instantiation may name private members (C++17 [temp.spec]/6), and this is how they are reached: by name
// and type, so that a TensorFlow without one of them fails to compile instead of misbehaving.
//
// In the anonymous namespace of starwire: STARWIRE_REACH(Tag, Class::member_); then object->*Reach(Tag()).
template <typename Tag, auto kMember>
struct Expose {
  friend auto Reach(Tag) { return kMember; }
};

}  // namespace
}  // namespace starwire

#define STARWIRE_REACH(name, member) \
  struct name {                      \
    friend auto Reach(name);         \
  };                                 \
  template struct Expose<name, &member>

#endif  // STARWIRE_CC_BASE_PRIVATE_MEMBERS_H_
