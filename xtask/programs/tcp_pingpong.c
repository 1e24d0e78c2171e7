/*
 * Messages over TCP, there and back, one after the other: what SEND's latency is compared with.
 *
 *   tcp_pingpong -p PORT --largest BYTES [-e] [-D SECONDS] [HOST]
 *
 * Both ends spin on recv, or sleep in it (-e). The client prints the messages of both directions, and half of a round trip: microseconds.
 */
#include "../../tests/programs/pair.h"

/* Round trips before the first one that counts. */
#define WARM_UP 100
/* Most round trips that are timed. */
#define MOST (16u << 20)

static void take(char *buf, size_t length)
{
	size_t have = 0;

	while (have < length) {
		ssize_t n = recv(side, buf + have, length - have, opt.events ? 0 : MSG_DONTWAIT);

		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (n == 0 && have == 0 && !is_client())
			exit(0);
		CHECK(n > 0, "the peer is gone (%s)", n == 0 ? "closed" : strerror(errno));
		have += (size_t)n;
	}
}

static int by_size(const void *a, const void *b)
{
	const float x = *(const float *)a, y = *(const float *)b;

	return (x > y) - (x < y);
}

static void measure(char *buf, size_t length)
{
	float *half = pages(MOST * sizeof(*half));
	double begun = now_s(), total = 0;
	size_t count = 0;

	while (count < MOST && now_s() - begun < opt.seconds) {
		double sent = now_s();

		side_send(buf, length);
		take(buf, length);
		half[count] = (float)((now_s() - sent) * 1e6 / 2);
		total += half[count++];
	}
	CHECK(count > 0, "no round trip within %g s", opt.seconds);
	qsort(half, count, sizeof(*half), by_size);
	printf("messages %zu\nmean_us %.3f\nmedian_us %.3f\np99_us %.3f\np999_us %.3f\n", 2 * (count + WARM_UP), total / (double)count,
	       half[count / 2], half[count - 1 - count / 100], half[count - 1 - count / 1000]);
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	size_t length = opt.largest ? opt.largest : 2;
	char *buf = pages(length);

	side_open();
	for (int i = 0; !is_client() || i < WARM_UP; i++) {
		if (is_client())
			side_send(buf, length);
		take(buf, length);
		if (!is_client())
			side_send(buf, length);
	}
	measure(buf, length);
	return 0;
}
