// Two processes: connections and a listener while the service, keeper and worker both, is killed. What is established goes on and
// ends with DISCONNECTED at both ends, the listener is found again, and ids on the same channels are not mistaken for each other.
// Then one process that has ended a connection when the service is killed, and one that has not read what it said last.
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { CONNECTIONS = 3, ROUNDS = 4, MINUTE_MS = 60000, PIDS_MAX = 16 };

struct end {
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	char text[16];
};

static struct rdma_event_channel *channel;

static int readable(struct rdma_event_channel *of, int wait_ms)
{
	struct pollfd polled = { of->fd, POLLIN, 0 };
	return poll(&polled, 1, wait_ms);
}

static struct rdma_cm_event *next(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;
	CHECK(readable(channel, MINUTE_MS) == 1);
	CHECK(rdma_get_cm_event(channel, &event) == 0);
	if (event->event != type) {
		printf("pid %d: %s (%d) instead of %s\n", getpid(), rdma_event_str(event->event), event->status,
		       rdma_event_str(type));
		exit(1);
	}
	return event;
}

static struct rdma_cm_event *with_status(struct rdma_cm_event *event, int status)
{
	CHECK(event->status == status);
	return event;
}

static void done(struct rdma_cm_event *event)
{
	CHECK(rdma_ack_cm_event(event) == 0);
}

static void equip(struct end *end, struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 0 }, .sq_sig_all = 1, .qp_type = IBV_QPT_RC };
	end->id = id;
	CHECK(rdma_create_qp(id, NULL, &attr) == 0);
	CHECK((end->mr = rdma_reg_msgs(id, end->text, sizeof end->text)));
	CHECK(rdma_post_recv(id, NULL, end->text, sizeof end->text, end->mr) == 0);
}

// Takes a message, and makes room for the next one.
static void take(struct end *end, const char *expected)
{
	struct ibv_wc wc;
	CHECK(rdma_get_recv_comp(end->id, &wc) == 1 && wc.status == IBV_WC_SUCCESS && !strcmp(end->text, expected));
	CHECK(rdma_post_recv(end->id, NULL, end->text, sizeof end->text, end->mr) == 0);
}

static void give(struct end *end, const char *text)
{
	struct ibv_wc wc;
	CHECK(rdma_post_send(end->id, NULL, (void *)text, strlen(text) + 1, NULL, IBV_SEND_INLINE) == 0);
	CHECK(rdma_get_send_comp(end->id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
}

static void put_away(struct end *end)
{
	CHECK(rdma_dereg_mr(end->mr) == 0);
	rdma_destroy_qp(end->id);
	CHECK(rdma_destroy_id(end->id) == 0);
}

// The other process is told, or tells, that it may go on.
static void say(int fd)
{
	CHECK(write(fd, "", 1) == 1);
}

static void hear(int fd)
{
	struct pollfd polled = { fd, POLLIN, 0 };
	char byte;
	CHECK(poll(&polled, 1, 2 * MINUTE_MS) == 1 && read(fd, &byte, 1) == 1);
}

// Asks for a connection on the channel; nobody has answered yet.
static void client_asks(struct end *end, unsigned short port)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) }, .sin_port = port };
	struct rdma_cm_id *id;
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1000) == 0);
	done(next(RDMA_CM_EVENT_ADDR_RESOLVED));
	CHECK(rdma_resolve_route(id, 1000) == 0);
	done(next(RDMA_CM_EVENT_ROUTE_RESOLVED));
	equip(end, id);
	CHECK(rdma_connect(id, NULL) == 0);
}

static void client_is_connected(struct end *end)
{
	struct rdma_cm_event *event = next(RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == end->id);
	done(event);
}

static void client_connects(struct end *end, unsigned short port)
{
	client_asks(end, port);
	client_is_connected(end);
}

static void server_answers(struct end *end, struct rdma_cm_id *listener)
{
	struct rdma_cm_event *event = next(RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *id = event->id;
	CHECK(event->listen_id == listener);
	equip(end, id);
	CHECK(rdma_accept(id, NULL) == 0);
	done(event);
}

static void server_is_connected(struct end *end)
{
	struct rdma_cm_event *event = next(RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == end->id);
	done(event);
}

static void server_accepts(struct end *end, struct rdma_cm_id *listener)
{
	server_answers(end, listener);
	server_is_connected(end);
}

static struct rdma_cm_id *listens(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	struct rdma_cm_id *listener;
	CHECK(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(listener, (struct sockaddr *)&any) == 0 && rdma_listen(listener, 0) == 0);
	return listener;
}

static void client(unsigned short port, int from, int to)
{
	struct end ends[CONNECTIONS];
	CHECK((channel = rdma_create_event_channel()));
	for (int at = 0; at < CONNECTIONS; at++)
		client_connects(&ends[at], port);
	for (int round = 0; round < ROUNDS; round++) {
		say(to);
		hear(from); // The service has been killed.
		for (int at = 0; at < CONNECTIONS; at++) {
			give(&ends[at], "ping");
			take(&ends[at], "pong");
		}
		// Even rounds: the channel has not been looked at since; odd ones: an id of the service before is used first.
		int old = round % CONNECTIONS;
		if (round % 2 == 0) {
			struct end more;
			client_connects(&more, port);
			give(&more, "more");
			CHECK(rdma_disconnect(more.id) == 0);
			struct rdma_cm_event *event = next(RDMA_CM_EVENT_DISCONNECTED);
			CHECK(event->id == more.id);
			done(event);
			put_away(&more);
		}
		CHECK(rdma_disconnect(ends[old].id) == 0);
		struct rdma_cm_event *event = next(RDMA_CM_EVENT_DISCONNECTED);
		CHECK(event->id == ends[old].id);
		done(event);
		put_away(&ends[old]);
		client_connects(&ends[old], port);
	}
	say(to);
	hear(from);
	for (int at = 0; at < CONNECTIONS; at++)
		put_away(&ends[at]);
	rdma_destroy_event_channel(channel);
}

// What a link in /proc/PID points to; an empty text: nothing that this process may see.
static void target(int pid, const char *link, char *text, size_t size)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/%s", pid, link);
	ssize_t len = readlink(path, text, size - 1);
	text[len < 0 ? 0 : len] = 0;
}

// Is it a service's process, in this network namespace?
static int is_service(int pid)
{
	char exe[512], theirs[64], own[64];
	target(pid, "exe", exe, sizeof exe);
	target(pid, "ns/net", theirs, sizeof theirs);
	target(getpid(), "ns/net", own, sizeof own);
	const char *name = strrchr(exe, '/');
	return name && !strcmp(name, "/ferroced") && !strcmp(theirs, own);
}

static int services(int *pids)
{
	int count = 0;
	DIR *proc = opendir("/proc");
	CHECK(proc);
	for (struct dirent *entry; (entry = readdir(proc));) {
		int pid = atoi(entry->d_name);
		if (pid > 0 && count < PIDS_MAX && is_service(pid))
			pids[count++] = pid;
	}
	closedir(proc);
	return count;
}

// Stopped first, so that neither sees the other die and replaces it.
static void kill_the_service(void)
{
	int pids[PIDS_MAX], count = services(pids);
	CHECK(count >= 2);
	for (int at = 0; at < count; at++)
		CHECK(kill(pids[at], SIGSTOP) == 0);
	for (int at = 0; at < count; at++)
		CHECK(kill(pids[at], SIGKILL) == 0);
}

// The end of a connection that the client has ended, whose events may come after others'.
static void server_ends(struct rdma_cm_id *expected, struct rdma_cm_id **ended)
{
	struct rdma_cm_event *event = next(RDMA_CM_EVENT_DISCONNECTED);
	CHECK(!expected || event->id == expected);
	*ended = event->id;
	done(event);
	CHECK(rdma_disconnect(*ended) == 0);
}

static void server(int from, int to, struct rdma_cm_id *listener)
{
	struct end ends[CONNECTIONS];
	struct rdma_cm_id *ended;
	for (int at = 0; at < CONNECTIONS; at++)
		server_accepts(&ends[at], listener);
	for (int round = 0; round < ROUNDS; round++) {
		hear(from);
		kill_the_service();
		say(to);
		for (int at = 0; at < CONNECTIONS; at++) {
			take(&ends[at], "ping");
			give(&ends[at], "pong");
		}
		int old = round % CONNECTIONS;
		if (round % 2 == 0) {
			struct end more;
			server_accepts(&more, listener);
			take(&more, "more");
			server_ends(more.id, &ended);
			put_away(&more);
		}
		server_ends(ends[old].id, &ended);
		put_away(&ends[old]);
		server_accepts(&ends[old], listener);
	}
	hear(from);
	say(to);
	for (int at = 0; at < CONNECTIONS; at++)
		server_ends(NULL, &ended);
	for (int at = 0; at < CONNECTIONS; at++)
		put_away(&ends[at]);
	CHECK(rdma_destroy_id(listener) == 0);
	rdma_destroy_event_channel(channel);
}

static void connect_two_ends(struct rdma_event_channel *of_server, struct end *server, struct rdma_cm_id *listener,
			     struct rdma_event_channel *of_client, struct end *client)
{
	channel = of_client;
	client_asks(client, rdma_get_src_port(listener));
	channel = of_server;
	server_answers(server, listener);
	channel = of_client;
	client_is_connected(client);
	channel = of_server;
	server_is_connected(server);
}

// The client has ended its connection, and the service dies before it hears of the server's answer.
static void forgotten_end(void)
{
	struct rdma_event_channel *of_server = rdma_create_event_channel();
	struct rdma_event_channel *of_client = rdma_create_event_channel();
	struct end server, client;
	CHECK(of_server && of_client);
	channel = of_server;
	struct rdma_cm_id *listener = listens();
	connect_two_ends(of_server, &server, listener, of_client, &client);

	struct rdma_event_channel *channels[] = { of_server, of_client };
	struct rdma_cm_id *ids[] = { server.id, client.id };
	for (int at = 0; at < 2; at++)
		CHECK(fcntl(channels[at]->fd, F_SETFL, O_NONBLOCK) == 0);
	CHECK(rdma_disconnect(client.id) == 0);
	kill_the_service();
	// Whoever is readable is looked at; a channel is also to learn of the service's death, with no event then.
	for (int over = 0; over != 3;) {
		struct pollfd polled[] = { { of_server->fd, POLLIN, 0 }, { of_client->fd, POLLIN, 0 } };
		CHECK(poll(polled, 2, MINUTE_MS) > 0);
		for (int at = 0; at < 2; at++) {
			struct rdma_cm_event *event;
			if (!polled[at].revents || rdma_get_cm_event(channels[at], &event))
				continue;
			if (event->event == RDMA_CM_EVENT_TIMEWAIT_EXIT) {
				done(event);
				continue;
			}
			CHECK(event->event == RDMA_CM_EVENT_DISCONNECTED && event->id == ids[at] && !(over & 1 << at));
			over |= 1 << at;
			done(event);
			CHECK(at == 1 || rdma_disconnect(server.id) == 0);
		}
	}

	put_away(&client);
	put_away(&server);
	CHECK(rdma_destroy_id(listener) == 0);
	rdma_destroy_event_channel(of_server);
	rdma_destroy_event_channel(of_client);
}

// Nothing is left to take, and nothing pretends that there is.
static void is_silent(struct rdma_event_channel *of)
{
	struct rdma_cm_event *event;
	CHECK(fcntl(of->fd, F_SETFL, O_NONBLOCK) == 0);
	if (rdma_get_cm_event(of, &event) == 0) {
		printf("pid %d: %s (%d) instead of silence\n", getpid(), rdma_event_str(event->event), event->status);
		exit(1);
	}
	CHECK(errno == EAGAIN);
	CHECK(readable(of, 0) == 0);
}

// The service dies with requests that nobody has read, and a child has copies of all sockets: calls that use the channel work at once,
// and the channel is silent then. (Peers of other hosts ask again.)
static void unread_requests(void)
{
	enum { REQUESTS = 2 };
	struct rdma_event_channel *of_server = rdma_create_event_channel(), *of_client = rdma_create_event_channel();
	struct rdma_event_channel *of_last = rdma_create_event_channel();
	struct end clients[REQUESTS + 1];
	CHECK(of_server && of_client && of_last);
	channel = of_last;
	struct rdma_cm_id *last = listens();
	channel = of_server;
	struct rdma_cm_id *listener = listens();
	channel = of_client;
	for (int at = 0; at < REQUESTS; at++)
		client_asks(&clients[at], rdma_get_src_port(listener));
	// Requests come in order: when this one is there, the others are.
	client_asks(&clients[REQUESTS], rdma_get_src_port(last));
	CHECK(readable(of_last, MINUTE_MS) == 1);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0)
		for (;;)
			pause();
	kill_the_service();

	channel = of_server;
	struct rdma_cm_id *another = listens();
	channel = of_client;
	for (int at = 0; at <= REQUESTS; at++)
		done(with_status(next(RDMA_CM_EVENT_UNREACHABLE), -ECONNRESET));
	is_silent(of_server);
	is_silent(of_last);
	is_silent(of_client);

	CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
	for (int at = 0; at <= REQUESTS; at++)
		put_away(&clients[at]);
	CHECK(rdma_destroy_id(listener) == 0 && rdma_destroy_id(another) == 0 && rdma_destroy_id(last) == 0);
	rdma_destroy_event_channel(of_server);
	rdma_destroy_event_channel(of_client);
	rdma_destroy_event_channel(of_last);
}

int main(void)
{
	int down[2], up[2], status;
	unsigned short port;
	CHECK(pipe(down) == 0 && pipe(up) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		struct pollfd polled = { down[0], POLLIN, 0 };
		CHECK(poll(&polled, 1, MINUTE_MS) == 1 && read(down[0], &port, sizeof port) == sizeof port);
		client(port, down[0], up[1]);
		return 0;
	}
	CHECK((channel = rdma_create_event_channel()));
	struct rdma_cm_id *listener = listens();
	port = rdma_get_src_port(listener);
	CHECK(write(down[1], &port, sizeof port) == sizeof port);
	server(up[0], down[1], listener);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	forgotten_end();
	unread_requests();
	printf("good\n");
	return 0;
}
