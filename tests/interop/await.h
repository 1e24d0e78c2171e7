/* For programs whose other end runs in an emulator. */
#ifndef AWAIT_H
#define AWAIT_H

#include "../programs/pair.h"

/* As wait_wc, but leaves the processor to the other end: both may be on one, and it may be emulated. */
static inline struct ibv_wc await_wc(struct ibv_cq *cq, const char *what)
{
	double end = now_s() + PATIENCE_S;
	struct ibv_wc wc;
	int n;

	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0) {
		CHECK(now_s() < end, "no completion of %s within %d s", what, PATIENCE_S);
		usleep(100);
	}
	CHECK(n == 1, "ibv_poll_cq: %d", n);
	return wc;
}

#endif
