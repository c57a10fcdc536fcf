-- needs: session log
-- ARGV: stream, now, new log epoch, window (3), before, after, key, origin, name, which of the last
-- four there are (four digits), since when it may be stored already (empty: it is not)
local ends = redis.call('HGET', base, 'ends')
local stream, now, flags = ARGV[1], tonumber(ARGV[2]), ARGV[12]
if not ends or has_come(ends, now) then
    return false
end
ends = seconds(ends)
local log = open_or_make_log(stream, ARGV[3], ends)
local window = window_of(log, ends, ARGV[4], ARGV[5], ARGV[6])
local function given(at)
    return string.sub(flags, at, at) == '1' and ARGV[7 + at] or nil
end
local since = tonumber(ARGV[13])
if since then
    local number, stored = stored_before(log, ARGV[11], since)
    if number then
        local attached = redis.call('HMGET', base, 'conn', 'fence')
        return { log.epoch, whole(number), stored, attached[1], attached[2], 0 }
    end
end
local payload, connection, fence, replaced = append(
    log, now, window, ARGV[7], given(1), given(2), given(3), given(4))
if not payload then
    return redis.error_reply('EVENTIDS this event log has issued its last id')
end
-- A response stream whose process died is dropped by nobody: what is too old to be replayed
-- leaves it with the first event of a newer one. :r has the response streams that hold events,
-- by the time of their oldest; a few of those that are due are looked at each time, so that an
-- event costs the same however many streams there are.
local AT_ONCE = 16
local by_age = base .. ':r'
local function is_response(name)
    return name and name ~= 'events' and name ~= 'get'
end
local function list(name, at)
    redis.call('ZADD', by_age, at, name)
    share_lifetime(by_age)
end
if is_response(stream) and log.count == 1 then
    list(stream, exact(log.first_at))
end
if is_response(stream) and log.head == 1 then
    if redis.call('HSETNX', base, 'listed', '1') == 1 then
        -- Those of a version that had no list.
        for _, field in ipairs(redis.call('HKEYS', base)) do
            local name = string.match(field, '^l:(.+)$')
            if is_response(name) and name ~= stream then
                list(name, '0')
            end
        end
    end
    local due = redis.call('ZRANGEBYSCORE', by_age, '-inf', '(' .. exact(now - window.age),
        'LIMIT', 0, AT_ONCE)
    for _, name in ipairs(due) do
        local other = open_log(name, ARGV[3], ends)
        if other then
            local before = other.count
            evict(other, now, window)
            if other.count < before then
                save(other)
            end
        end
        if not other or other.count == 0 then
            redis.call('UNLINK', base .. ':e:' .. name, base .. ':k:' .. name)
            redis.call('ZREM', by_age, name)
        else
            list(name, exact(other.first_at))
        end
    end
end
return { log.epoch, whole(log.head), payload, connection, fence, replaced }
