/*
 * Forks while other threads list, open and close devices and register memory, from the very first use on. Each child does the same
 * anew: no lock of the parent's threads, no half-made state may be in its way.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(condition) do { if (!(condition)) { printf("line %d: %s (errno %d)\n", __LINE__, #condition, errno); fflush(stdout); _exit(1); } } while (0)

enum { THREADS = 3, FORKS = 200, HANGS_AFTER_S = 60 };

static atomic_int stop;
static struct ibv_device *_Atomic seen;

static void use(struct ibv_device *device)
{
	struct ibv_context *context = ibv_open_device(device);
	struct ibv_device_attr attr;
	struct ibv_port_attr port;
	union ibv_gid gid;
	char memory[64];

	MUST(context);
	MUST(!ibv_query_device(context, &attr) && !ibv_query_port(context, 1, &port) && !ibv_query_gid(context, 1, 0, &gid));
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	MUST(pd && channel);
	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, channel, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	MUST(cq && mr);
	MUST(!ibv_dereg_mr(mr) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel) && !ibv_dealloc_pd(pd));
	MUST(!ibv_close_device(context));
	/* A refusal, which is recorded. */
	MUST(!ibv_open_device(NULL));
}

static void once(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	MUST(list && list[0]);
	use(list[0]);
	seen = list[0];
	ibv_free_device_list(list);
}

static void *many(void *unused)
{
	while (!stop)
		once();
	return unused;
}

static void child(void)
{
	alarm(HANGS_AFTER_S);
	/* A device that the parent listed is one of the child's too. */
	struct ibv_device *inherited = seen;
	if (inherited)
		use(inherited);
	once();
	MUST(!inherited || inherited == seen);
	_exit(0);
}

int main(void)
{
	pthread_t threads[THREADS];

	for (int at = 0; at < THREADS; at++)
		MUST(!pthread_create(&threads[at], NULL, many, NULL));
	for (int at = 0; at < FORKS; at++) {
		int status = 0;
		pid_t pid = fork();
		MUST(pid >= 0);
		if (pid == 0)
			child();
		MUST(waitpid(pid, &status, 0) == pid);
		if (status != 0)
			printf("child %d ended with %#x\n", at, status);
		MUST(status == 0);
	}
	stop = 1;
	for (int at = 0; at < THREADS; at++)
		MUST(!pthread_join(threads[at], NULL));
	puts("good");
	return 0;
}
