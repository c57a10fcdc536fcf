-- needs: session log
-- KEYS: sessions.
-- ARGV: stream, new log epoch.
-- Of each session: whether it carries others; epoch and number of the stream's head, if there is
-- such a stream. False: it is not there.
local heads = {}
for at, name in ipairs(KEYS) do
    base = name
    local ends = redis.call('HGET', base, 'ends')
    local log = ends and open_log(ARGV[1], ARGV[2], seconds(ends))
    if ends then
        local carries = redis.call('EXISTS', base .. ':c')
        heads[at] = log and { carries, log.epoch, whole(log.head) } or { carries }
    else
        heads[at] = false
    end
end
return heads
