/* Share independent items of work between threads. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define MAX_THREADS 256

/* Compute one item; `worker` is the number of the thread, to find its own scratch memory. */
typedef void Work(const void *context, int64_t item, int64_t worker);

typedef struct {
    Work *work;
    const void *context;
    int64_t items, number;
    atomic_llong *next;
} Worker;

/* Each free thread takes the next item. Items share nothing, so it does not matter which thread computes which. */
static void *run_worker(void *argument) {
    Worker *worker = argument;
    int64_t item;
    while ((item = atomic_fetch_add(worker->next, 1)) < worker->items) worker->work(worker->context, item, worker->number);
    return NULL;
}

/* Compute all items on `threads` threads, this one included, or on fewer if the system refuses to start them. */
static void share_work(Work *work, const void *context, int64_t items, int64_t threads) {
    atomic_llong next = 0;
    Worker workers[MAX_THREADS];
    pthread_t others[MAX_THREADS];
    int64_t started = 1;
    for (int64_t i = 0; i < threads; i++) workers[i] = (Worker){work, context, items, i, &next};
    while (started < threads && pthread_create(&others[started], NULL, run_worker, &workers[started]) == 0) started++;
    run_worker(&workers[0]);
    for (int64_t i = 1; i < started; i++) pthread_join(others[i], NULL);
}
