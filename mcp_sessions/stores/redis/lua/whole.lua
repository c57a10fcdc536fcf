-- needs: session log keys
-- ARGV: new log epoch
--
-- All of a session: its record; version and value of its data; what its GET stream carries; its
-- logs, each with its counters and events; its keys, in the order of finishing, running ones last.
local ends = redis.call('HGET', base, 'ends')
if not ends then
    return false
end
local logs = {}
for _, name in ipairs(redis.call('HKEYS', base)) do
    if string.sub(name, 1, 2) == 'l:' then
        local stream = string.sub(name, 3)
        local log = open_log(stream, ARGV[1], seconds(ends))
        local counts = {
            whole(log.head), whole(log.floor), whole(log.evicted), whole(log.count),
            whole(log.bytes),
        }
        logs[#logs + 1] = {
            stream, log.epoch, counts, redis.call('XRANGE', log.events, '-', '+'),
        }
    end
end
open_keys('0', '0')
local order, known, found = redis.call('ZRANGE', finished, 0, -1), {}, {}
for _, key in ipairs(order) do
    known[key] = true
end
for _, name in ipairs(redis.call('HKEYS', entries)) do
    local key = string.sub(name, 3)
    if string.sub(name, 1, 2) == 'k:' and not known[key] then
        order[#order + 1] = key
    end
end
for i, key in ipairs(order) do
    local entry = get_key(key)
    if not entry then
        error('the record of a request key is gone')
    end
    found[i] = {
        key, entry.digest, entry.runner, entry.run or '', entry.scopes or '[]', exact(entry.at),
        entry.state, redis.call('HGET', entries, 'a:' .. key) or '',
    }
end
return {
    whole_record(), redis.call('HGET', base, 'datav'), redis.call('GET', base .. ':d'),
    redis.call('HGETALL', base .. ':c'), logs, found,
}
