"""The limit of the published weights of each model.

    limit = PublishedLimit(config.max_published, versions, sampling_queue, sessions)
    limit.apply(session, model_id)              # after a publication, in the thread that trains

The weights that have not been sampled for the longest time are removed. Those without a name cannot be published again,
so their samplers end. Those with a name are kept if a sampler uses them, and otherwise read again from their checkpoint
when they are needed.
"""

from camshaft.service.commands import Job, JobQueue
from camshaft.service.futures import Future, Result
from camshaft.service.sampling import Version, Versions
from camshaft.service.sessions import Session, Sessions
from camshaft.service.store import remove_sampler


class PublishedLimit:
    """A maximum number of published sets of weights, which holds for each model."""

    def __init__(self, maximum: int, versions: Versions, sampling_queue: JobQueue, sessions: Sessions):
        self.maximum, self.versions, self.sampling_queue, self.sessions = maximum, versions, sampling_queue, sessions

    def apply(self, session: Session, model_id: str) -> None:
        """Remove the weights of a model beyond the limit. The thread that trains calls this."""
        published = sorted(self.versions.published_by(model_id), key=lambda version: -version.used_at)
        surplus = published[self.maximum :]
        for version in surplus:
            if version.source.model_id is not None:
                self._end_samplers(session, version)
        self.versions.forget(lambda: set(surplus) - self.sessions.used_versions())

    def _end_samplers(self, session: Session, version: Version) -> None:
        """End the samplers of weights without a name, unless one has requests without a result."""
        with session.lock:
            samplers = {number: each for number, each in session.samplers.items() if each.version is version}
            if any(sampler.repetitions.are_pending() for sampler in samplers.values()):
                return
            for number in samplers:
                del session.samplers[number]
                self.sampling_queue.store.write(remove_sampler(session.identifier, number))

        def forget(_: object) -> list[Result]:
            version.end_sampling()
            return [Result.of_json({})]

        self.sampling_queue.put(Job(Future(session.identifier), forget))
