// Messages and notices between ranks by c10d: point-to-point calls of a backend that nobody else
// uses (Gloo), and keys of its store. Works on any thread. Dropping the last owner closes the
// connections, which the other ranks notice at once.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>

#include "share/peers.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tradewind {

std::shared_ptr<Peers> make_c10d_peers(c10::intrusive_ptr<c10d::Backend> backend);
// `prefix` tells the keys of several boards apart.
std::shared_ptr<Board> make_c10d_board(c10::intrusive_ptr<c10d::Store> store, int rank,
                                       std::string prefix);

}  // namespace tradewind
