#include "share/host_links.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/error.h"

#ifdef __linux__
#include <sys/syscall.h>
#endif

namespace tradewind {

#ifdef __linux__
namespace {

// What a rank says when it has connected: its place. Anything else is a stranger.
struct Greeting {
  std::uint64_t magic = 0x74726164'6577696EULL;
  std::int64_t place = 0;
};

// A byte with room for one open file beside it. Stays where it is made: it points into itself.
struct FileMessage {
  std::byte payload{1};
  iovec part{&payload, 1};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  msghdr call{};

  FileMessage() {
    call.msg_iov = &part;
    call.msg_iovlen = 1;
    call.msg_control = control.data();
    call.msg_controllen = control.size();
  }
  FileMessage(const FileMessage&) = delete;
  FileMessage& operator=(const FileMessage&) = delete;
  cmsghdr* header() { return CMSG_FIRSTHDR(&call); }
};

[[noreturn]] void fail_call(const char* call) {
  fail(ErrorKind::kBadState, "ranks of this host: ", call, " failed: ", std::strerror(errno),
       "; use strategy=\"allreduce\"");
}

// A name of the abstract kind: it begins with a zero, and goes with its socket.
socklen_t address_of(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() >= sizeof(address.sun_path)) {
    fail(ErrorKind::kBadValue, "ranks of this host: expected a socket name of 1 to ",
         sizeof(address.sun_path) - 1, " bytes, got ", name.size());
  }
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

int make_socket() {
  const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (made < 0) fail_call("socket");
  return made;
}

bool wait_readable(int file, Deadline deadline) {
  return poll_until(deadline, [&] {
    pollfd asked{file, POLLIN, 0};
    return poll(&asked, 1, 0) > 0;
  });
}

int process_file(pid_t pid) {
#ifdef SYS_pidfd_open
  if (pid > 0 && pid != getpid()) return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#endif
  (void)pid;
  return -1;
}

// Takes all bells that have rung; false where the other end is gone.
bool drain(int socket) {
  std::array<std::byte, 8> bell{};
  for (;;) {
    const auto size = recv(socket, bell.data(), bell.size(), MSG_DONTWAIT);
    if (size > 0 || (size < 0 && errno == EINTR)) continue;
    return size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }
}

}  // namespace

HostLinks::HostLinks(Options options)
    : options_(std::move(options)), links_(options_.ranks.size()), owner_pid_(getpid()) {
  try {
    meet();
  } catch (...) {
    close_all();
    throw;
  }
}

void HostLinks::meet() {
  listen_for_others();
  for (int place = 0; place < own_place(); ++place) {
    if (!poll_until(options_.deadline, [&] { return try_connect(place); })) {
      fail_missing("to be reached");
    }
  }
  for (int num_missing = num_places() - own_place() - 1; num_missing > 0; --num_missing) {
    if (!poll_until(options_.deadline, [&] { return try_accept(); })) fail_missing("to come");
  }
  if (listener_ >= 0) (void)close(std::exchange(listener_, -1));
}

void HostLinks::listen_for_others() {
  if (own_place() + 1 >= num_places()) return;
  sockaddr_un address;
  const socklen_t size = address_of(options_.names[static_cast<std::size_t>(own_place())], address);
  listener_ = make_socket();
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&address), size) != 0) fail_call("bind");
  if (listen(listener_, num_places()) != 0) fail_call("listen");
}

bool HostLinks::try_connect(int place) {
  sockaddr_un address;
  const socklen_t size = address_of(options_.names[static_cast<std::size_t>(place)], address);
  const int made = make_socket();
  Greeting greeting;
  greeting.place = own_place();
  const bool is_there = connect(made, reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
                        send(made, &greeting, sizeof(greeting), MSG_NOSIGNAL) == sizeof(greeting);
  if (!is_there) {  // nobody listens yet, or too many wait
    (void)close(made);
    return false;
  }
  keep(place, made);
  return true;
}

bool HostLinks::try_accept() {
  const int made = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (made < 0) return false;
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  Greeting greeting;
  // Names are no secret on this machine: whoever is not ours is sent away.
  const bool is_ours = getsockopt(made, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 &&
                       credentials.uid == geteuid() && wait_readable(made, options_.deadline) &&
                       recv(made, &greeting, sizeof(greeting), MSG_DONTWAIT) == sizeof(greeting) &&
                       greeting.magic == Greeting{}.magic && greeting.place > own_place() &&
                       greeting.place < num_places() &&
                       links_[static_cast<std::size_t>(greeting.place)].socket < 0;
  if (!is_ours) {
    (void)close(made);
    return false;
  }
  keep(static_cast<int>(greeting.place), made);
  return true;
}

void HostLinks::keep(int place, int socket) {
  Link& link = links_[static_cast<std::size_t>(place)];
  link.socket = socket;
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return;
  if (credentials.uid != geteuid()) {
    fail(ErrorKind::kBadState, "ranks of this host: expected rank ", rank_at(place),
         " to be of user ", geteuid(), ", got one of user ", credentials.uid);
  }
  link.process = process_file(credentials.pid);
}

std::vector<int> HostLinks::trade_files(int file) {
  FileMessage message;
  cmsghdr* header = message.header();
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &file, sizeof(int));
  for (const Link& link : links_) {
    // Who is gone shows below.
    if (link.socket >= 0) (void)sendmsg(link.socket, &message.call, MSG_NOSIGNAL);
  }
  std::vector<int> files(links_.size(), -1);
  try {
    for (int place = 0; place < num_places(); ++place) {
      if (place != own_place()) files[static_cast<std::size_t>(place)] = take_file(place);
    }
  } catch (...) {
    for (const int taken : files) {
      if (taken >= 0) (void)close(taken);
    }
    throw;
  }
  return files;
}

int HostLinks::take_file(int place) {
  const int socket = links_[static_cast<std::size_t>(place)].socket;
  FileMessage message;
  if (!wait_readable(socket, options_.deadline) ||
      recvmsg(socket, &message.call, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != 1) {
    fail(ErrorKind::kPeerLost, "rank ", rank_at(own_place()), ": rank ", rank_at(place),
         " of this host did not hand over its memory");
  }
  const cmsghdr* header = message.header();
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS ||
      header->cmsg_len != CMSG_LEN(sizeof(int))) {
    fail(ErrorKind::kPeerLost, "rank ", rank_at(own_place()), ": rank ", rank_at(place),
         " of this host sent something else than its memory; start all ranks with one version");
  }
  int file = -1;
  std::memcpy(&file, CMSG_DATA(header), sizeof(int));
  return file;
}

void HostLinks::ring() noexcept {
  const std::byte bell{1};
  for (const Link& link : links_) {
    // Where it is full, bells enough wait to be heard.
    if (link.socket >= 0) (void)send(link.socket, &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

bool HostLinks::wait() {
  std::vector<pollfd> asked;
  std::vector<Link*> of;
  for (Link& link : links_) {
    if (link.socket < 0 || link.is_gone.load()) continue;
    for (const int file : {link.socket, link.process}) {
      if (file < 0) continue;
      asked.push_back({file, POLLIN, 0});
      of.push_back(&link);
    }
  }
  if (asked.empty() || is_hung_up_.load()) return false;
  if (poll(asked.data(), asked.size(), -1) < 0) return errno == EINTR || errno == ENOMEM;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    if (asked[i].revents == 0) continue;
    const bool is_process = asked[i].fd == of[i]->process;
    if (is_process || !drain(asked[i].fd)) of[i]->is_gone.store(true);
  }
  return !is_hung_up_.load();
}

void HostLinks::hang_up() noexcept {
  is_hung_up_.store(true);
  // Open until the destructor, as other threads may be about to ring.
  for (const Link& link : links_) {
    if (link.socket >= 0) (void)shutdown(link.socket, SHUT_RDWR);
  }
}
#else
HostLinks::HostLinks(Options /*options*/) {
  fail(ErrorKind::kBadState,
       "ranks of this host: expected Linux, whose sockets without a path connect them; use "
       "strategy=\"allreduce\"");
}
std::vector<int> HostLinks::trade_files(int /*file*/) { return {}; }
void HostLinks::ring() noexcept {}
bool HostLinks::wait() { return false; }
void HostLinks::hang_up() noexcept {}
#endif

HostLinks::~HostLinks() noexcept {
  // In a forked child these are the parent's connections still.
  if (owner_pid_ == getpid()) hang_up();
  close_all();
}

void HostLinks::fail_missing(const std::string& doing) const {
  std::string missing;
  for (int place = 0; place < num_places(); ++place) {
    if (place == own_place() || links_[static_cast<std::size_t>(place)].socket >= 0) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(rank_at(place));
  }
  fail(ErrorKind::kPeerLost, "rank ", rank_at(own_place()), ": waited for ranks of this host ",
       doing, " until the deadline; missing: rank ", missing,
       "; where they are on another machine or in another network namespace, give each host a "
       "TRADEWIND_HOST_KEY of its own");
}

void HostLinks::close_all() noexcept {
  for (Link& link : links_) {
    for (int* file : {&link.socket, &link.process}) {
      if (*file >= 0) (void)close(std::exchange(*file, -1));
    }
  }
  if (listener_ >= 0) (void)close(std::exchange(listener_, -1));
}

}  // namespace tradewind
